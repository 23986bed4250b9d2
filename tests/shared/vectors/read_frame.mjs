// Prints what frames hold, as JSON: node read_frame.mjs FILE...
//
// It knows docs/protocol.md and @msgpack/msgpack, and nothing of teleloader's own code. What JSON cannot say is
// tagged: {"$int": "18446744073709551615"}, {"$float": "nan"}, {"$bytes": "00ff"}.

import { readFileSync } from "node:fs";
import { decode } from "@msgpack/msgpack";

const READERS = {
  bool: [1, (view, at) => view.getUint8(at) !== 0],
  int8: [1, (view, at) => view.getInt8(at)],
  int16: [2, (view, at) => view.getInt16(at, true)],
  int32: [4, (view, at) => view.getInt32(at, true)],
  int64: [8, (view, at) => view.getBigInt64(at, true)],
  uint8: [1, (view, at) => view.getUint8(at)],
  uint16: [2, (view, at) => view.getUint16(at, true)],
  uint32: [4, (view, at) => view.getUint32(at, true)],
  uint64: [8, (view, at) => view.getBigUint64(at, true)],
  float16: [2, (view, at) => float16(view.getUint16(at, true))],
  float32: [4, (view, at) => view.getFloat32(at, true)],
  float64: [8, (view, at) => view.getFloat64(at, true)],
  complex64: [8, (view, at) => [view.getFloat32(at, true), view.getFloat32(at + 4, true)]],
  complex128: [16, (view, at) => [view.getFloat64(at, true), view.getFloat64(at + 8, true)]],
  bfloat16: [2, (view, at) => bfloat16(view.getUint16(at, true))],
};

function float16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

function bfloat16(bits) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, bits * 0x10000);
  return view.getFloat32(0);
}

function tagged(value) {
  if (typeof value === "bigint") {
    const small = value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER;
    return small ? Number(value) : { $int: value.toString() };
  }
  if (typeof value === "number") {
    if (Number.isNaN(value)) return { $float: "nan" };
    if (!Number.isFinite(value)) return { $float: value > 0 ? "inf" : "-inf" };
    return Object.is(value, -0) ? { $float: "-0.0" } : value;
  }
  if (value instanceof Uint8Array) return { $bytes: Buffer.from(value).toString("hex") };
  if (Array.isArray(value)) return value.map(tagged);
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, tagged(item)]));
  }
  return value;
}

// The array nodes of a tree in the order in which they stand in it.
function arrayNodes(node) {
  if (Array.isArray(node)) return node.flatMap(arrayNodes);
  if (node === null || typeof node !== "object" || node instanceof Uint8Array) return [];
  const [[kind, content]] = Object.entries(node);
  if (kind === "array") return [content];
  if (kind === "namedtuple" || kind === "dataclass") return arrayNodes(content[3]);
  return arrayNodes(content);
}

function nested(values, shape) {
  if (shape.length === 0) return values[0];
  const size = values.length / shape[0];
  return Array.from({ length: shape[0] }, (_, i) => nested(values.slice(i * size, (i + 1) * size), shape.slice(1)));
}

function elements(bytes, dtype, shape) {
  const [size, read] = READERS[dtype];
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const values = Array.from({ length: bytes.byteLength / size }, (_, i) => read(view, i * size));
  return tagged(nested(values, shape));
}

function readFrame(path) {
  const file = new Uint8Array(readFileSync(path));
  const values = decode(file, { useBigInt64: true });
  const [magic, size, hasChecksum, checksum, headerSize, header] = values;
  const rest = values.slice(6);
  const segments = rest.filter((_, i) => i % 2 === 1);
  const pads = rest.filter((_, i) => i % 2 === 0);
  const nodes = header.failure || header.end ? [] : arrayNodes(header.tree);
  return {
    magic,
    count: values.length,
    size: Number(size),
    checksum: hasChecksum ? checksum.toString(16).padStart(16, "0") : null,
    header_size: headerSize,
    header: tagged(header),
    pads_are_zero: pads.every((pad) => pad.every((byte) => byte === 0)),
    arrays: segments.map((segment, i) => {
      const [dtype, shape, kind] = nodes[i].map((part) => (Array.isArray(part) ? part.map(Number) : part));
      const array = { dtype, shape, kind, offset: segment.byteOffset - file.byteOffset, segment: tagged(segment).$bytes };
      return header.compression ? array : { ...array, values: elements(segment, dtype, shape) };
    }),
  };
}

console.log(JSON.stringify(process.argv.slice(2).map(readFrame)));
