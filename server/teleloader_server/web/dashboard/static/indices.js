// Writes the frame of an index list (docs/protocol.md, "Frame format"): a header without arrays, and no checksum.

const PROLOGUE = 34;

export function indexFrame({ loader, epoch, batch }, tree) {
  const header = [0x84, ...text("loader"), ...text(loader), ...text("epoch"), ...integer(epoch), ...text("batch"),
    ...integer(batch), ...text("tree"), ...(Array.isArray(tree) ? list(tree) : integer(tree))];
  const end = PROLOGUE + header.length;
  const size = 64 * Math.ceil((end + 2) / 64);
  const frame = new Uint8Array(size);
  const view = new DataView(frame.buffer);
  frame.set([0xdd, 0, 0, 0, 7, 0xa4, 0x54, 0x4c, 0x46, 0x31, 0xcf]);
  view.setBigUint64(11, BigInt(size));
  frame.set([0xc2, 0xcf], 19);
  frame[29] = 0xce;
  view.setUint32(30, header.length);
  frame.set(header, PROLOGUE);
  frame.set([0xc4, size - end - 2], end);
  return frame;
}

function list(items) {
  return [0xdd, ...bigEndian(4, (view) => view.setUint32(0, items.length)), ...items.flatMap(integer)];
}

function integer(value) {
  if (!Number.isSafeInteger(value)) throw new Error(`cannot send index ${value}: JavaScript does not hold it exactly`);
  return [0xd3, ...bigEndian(8, (view) => view.setBigInt64(0, BigInt(value)))];
}

function text(value) {
  const encoded = new TextEncoder().encode(value);
  return [0xd9, encoded.length, ...encoded];
}

function bigEndian(size, write) {
  const view = new DataView(new ArrayBuffer(size));
  write(view);
  return new Uint8Array(view.buffer);
}
