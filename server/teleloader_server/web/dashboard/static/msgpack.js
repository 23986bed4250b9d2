// Reads one msgpack value: what a frame's header is made of. A number that JavaScript cannot hold exactly is a BigInt,
// a map a list of [key, value] pairs, because its keys need not be strings.

const MAX_DEPTH = 600; // a tree has up to 128 containers inside each other, each of up to four values

export class MsgpackMap {
  constructor(pairs) {
    this.pairs = pairs;
  }
}

export function unpack(bytes) {
  const reader = new Reader(bytes);
  const value = reader.value(0);
  if (reader.at !== bytes.length) throw new Error("invalid msgpack: unexpected data after the value");
  return value;
}

class Reader {
  #bytes;
  #view;
  at = 0;

  constructor(bytes) {
    this.#bytes = bytes;
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  value(depth) {
    if (depth > MAX_DEPTH) throw new Error("invalid msgpack: too many nested containers");
    const type = this.#view.getUint8(this.#skip(1));
    if (type <= 0x7f) return type;
    if (type <= 0x8f) return this.#map(type & 0x0f, depth);
    if (type <= 0x9f) return this.#array(type & 0x0f, depth);
    if (type <= 0xbf) return this.#text(type & 0x1f);
    if (type >= 0xe0) return type - 0x100;
    switch (type) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.#raw(this.#uint(1));
      case 0xc5: return this.#raw(this.#uint(2));
      case 0xc6: return this.#raw(this.#uint(4));
      case 0xca: return this.#view.getFloat32(this.#skip(4));
      case 0xcb: return this.#view.getFloat64(this.#skip(8));
      case 0xcc: return this.#uint(1);
      case 0xcd: return this.#uint(2);
      case 0xce: return this.#uint(4);
      case 0xcf: return narrow(this.#view.getBigUint64(this.#skip(8)));
      case 0xd0: return this.#view.getInt8(this.#skip(1));
      case 0xd1: return this.#view.getInt16(this.#skip(2));
      case 0xd2: return this.#view.getInt32(this.#skip(4));
      case 0xd3: return narrow(this.#view.getBigInt64(this.#skip(8)));
      case 0xd9: return this.#text(this.#uint(1));
      case 0xda: return this.#text(this.#uint(2));
      case 0xdb: return this.#text(this.#uint(4));
      case 0xdc: return this.#array(this.#uint(2), depth);
      case 0xdd: return this.#array(this.#uint(4), depth);
      case 0xde: return this.#map(this.#uint(2), depth);
      case 0xdf: return this.#map(this.#uint(4), depth);
      default: throw new Error(`unknown msgpack type 0x${type.toString(16)}`);
    }
  }

  #skip(size) {
    const start = this.at;
    if (size > this.#bytes.length - start) throw new Error("invalid msgpack: truncated value");
    this.at += size;
    return start;
  }

  #uint(size) {
    const at = this.#skip(size);
    return size === 1 ? this.#view.getUint8(at) : size === 2 ? this.#view.getUint16(at) : this.#view.getUint32(at);
  }

  #raw(size) {
    const start = this.#skip(size);
    return this.#bytes.subarray(start, start + size);
  }

  #text(size) {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(this.#raw(size));
  }

  #array(size, depth) {
    const items = [];
    while (items.length < size) items.push(this.value(depth + 1));
    return items;
  }

  #map(size, depth) {
    const pairs = [];
    while (pairs.length < size) pairs.push([this.value(depth + 1), this.value(depth + 1)]);
    return new MsgpackMap(pairs);
  }
}

function narrow(big) {
  const small = Number(big);
  return Number.isSafeInteger(small) ? small : big;
}
