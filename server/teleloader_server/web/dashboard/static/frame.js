// Reads a frame (docs/protocol.md, "Frame format"), uncompressed and without looking at its checksum: this page asks for
// none, and TCP has one.

import { MsgpackMap, unpack } from "./msgpack.js";

const PROLOGUE = 34;
const MAX_DEPTH = 128;
const SIZES = {
  bool: 1, int8: 1, int16: 2, int32: 4, int64: 8, uint8: 1, uint16: 2, uint32: 4, uint64: 8,
  float16: 2, float32: 4, float64: 8, complex64: 8, complex128: 16, bfloat16: 2,
  float8_e4m3fn: 1, float8_e4m3fnuz: 1, float8_e5m2: 1, float8_e5m2fnuz: 1,
};
const PAIRS = new Set(["dict", "ordereddict", "defaultdict", "counter"]);
const ITEMS = new Set(["tuple", "set", "frozenset", "range", "slice"]);
const NAMED = new Set(["namedtuple", "dataclass"]);

const aligned = (size) => 64 * Math.ceil(size / 64);

// The frame's {address, padding, failure, end, tree}, of which two are null. A node of the tree is one of
//   {kind: "value", value}             null, a boolean, number, BigInt, string or Uint8Array
//   {kind: "complex", value: [re, im]}
//   {kind: "array", dtype, shape, as, bytes}
//   {kind: "list" or another of ITEMS, items: [node]}
//   {kind: one of PAIRS, entries: [[node, node]]}
//   {kind: one of NAMED, name, entries: [[string, node]]}
//   {kind: "registered", name, items: [node]}  with the plain value
export function readFrame(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const { values, headerSize } = readPrologue(view);
  const header = record(unpack(bytes.subarray(PROLOGUE, PROLOGUE + headerSize)));
  if (header.compression !== undefined) throw new Error(`cannot read a compressed frame (${header.compression})`);
  const segments = new Segments(bytes, view, PROLOGUE + headerSize);
  const tree = header.tree === undefined ? null : nodeOf(header.tree, segments, 0);
  segments.finish(values);
  return {
    address: { loader: header.loader, epoch: header.epoch, batch: header.batch },
    padding: header.padding ?? 0,
    failure: header.failure === undefined ? null : record(header.failure),
    end: header.end === undefined ? null : record(header.end),
    tree,
  };
}

function readPrologue(view) {
  const size = view.byteLength;
  if (size < PROLOGUE) throw new Error(`truncated frame: expected at least ${PROLOGUE} bytes, got ${size}`);
  const markers = [0, 5, 10, 20, 29].map((at) => view.getUint8(at));
  if (markers.join() !== "221,164,207,207,206" || view.getUint32(6) !== 0x544c4631) {
    throw new Error("invalid frame or unsupported protocol version");
  }
  const stated = view.getBigUint64(11);
  if (stated !== BigInt(size) || size % 64 !== 0) throw new Error(`invalid frame: expected ${stated} bytes, got ${size}`);
  const headerSize = view.getUint32(30);
  if (PROLOGUE + headerSize > size) throw new Error("invalid frame: the header exceeds the frame");
  return { values: view.getUint32(1), headerSize };
}

// The arrays, which stand after the header in the order in which the tree names them.
class Segments {
  #bytes;
  #view;
  #end;
  #taken = 0;

  constructor(bytes, view, end) {
    this.#bytes = bytes;
    this.#view = view;
    this.#end = end;
  }

  take(dtype, shape) {
    const wanted = shape.reduce((product, size) => product * size, SIZES[dtype] ?? NaN);
    const start = aligned(this.#end + 7);
    if (start > this.#bytes.length || this.#view.getUint8(start - 5) !== 0xc6) {
      throw new Error("invalid frame: an array of the tree is missing");
    }
    const size = this.#view.getUint32(start - 4);
    if (size !== wanted || start + size > this.#bytes.length) {
      throw new Error(`invalid frame: wrong size of array ${dtype}(${shape.join(", ")}), got ${size} bytes`);
    }
    this.#end = start + size;
    this.#taken += 1;
    return this.#bytes.subarray(start, this.#end);
  }

  finish(values) {
    if (aligned(this.#end + 2) !== this.#bytes.length || values !== 7 + 2 * this.#taken) {
      throw new Error("invalid frame: the number of arrays does not match the tree");
    }
  }
}

function nodeOf(value, segments, depth) {
  if (depth > MAX_DEPTH) throw new Error("invalid frame: too many nested containers");
  const node = (item) => nodeOf(item, segments, depth + 1);
  if (Array.isArray(value)) return { kind: "list", items: value.map(node) };
  if (!(value instanceof MsgpackMap)) return { kind: "value", value };
  if (value.pairs.length !== 1) throw new Error("invalid frame: a tree node must have one entry");
  const [[kind, content]] = value.pairs;
  if (kind === "array") {
    const [dtype, shape, as] = content;
    return { kind, dtype, shape, as, bytes: segments.take(dtype, shape) };
  }
  if (PAIRS.has(kind)) return { kind, entries: content.map(([key, item]) => [node(key), node(item)]) };
  if (ITEMS.has(kind)) return { kind, items: content.map(node) };
  if (kind === "deque") return { kind, items: content[1].map(node) };
  if (kind === "registered") return { kind, name: content[0], items: [node(content[1])] };
  if (kind === "int") return { kind: "value", value: BigInt(content) };
  if (kind === "complex") return { kind, value: content };
  if (!NAMED.has(kind)) throw new Error(`invalid frame: unknown tree node ${JSON.stringify(kind)}`);
  const [, name, fields, items] = content;
  return { kind, name, entries: fields.map((field, i) => [field, node(items[i])]) };
}

function record(map) {
  if (!(map instanceof MsgpackMap)) throw new Error("invalid frame: the header must be a map");
  return Object.fromEntries(map.pairs);
}
