// What an array's bytes mean, and whether they are an image.

const READ = {
  bool: [1, (view, at) => view.getUint8(at)],
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
  bfloat16: [2, (view, at) => bfloat16(view.getUint16(at, true))],
};
const SMALLEST_IMAGE = 8; // pixels a side, where nothing but the shape speaks for an image

function float16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const word = new DataView(new ArrayBuffer(4));

function bfloat16(bits) {
  word.setUint16(0, bits);
  return word.getFloat32(0);
}

// The elements [start, stop) of an array node as numbers or BigInts; null for a type that this page cannot read.
export function elements({ dtype, bytes }, start, stop) {
  if (READ[dtype] === undefined) return null;
  const [size, read] = READ[dtype];
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: Math.min(stop, bytes.length / size) - start }, (_, i) => read(view, (start + i) * size));
}

// How an array node is read as images: {images, height, width, channels, planar}; null when it is none. With channels
// an image needs 1 or 3 of them, last (HWC) or first (CHW). Without, it must look like one: bytes, or a square.
export function imagesIn({ dtype, shape }) {
  const isFloat = dtype === "float16" || dtype === "float32" || dtype === "bfloat16";
  if ((dtype !== "uint8" && !isFloat) || shape.length < 2 || shape.length > 4 || shape.includes(0)) return null;
  const [a, b, c] = [1, 1, ...shape].slice(-3);
  const isColour = (size) => size === 1 || size === 3;
  if (shape.length > 2 && isColour(c) && !(isColour(a) && b < 4)) {
    return { images: shape.length === 4 ? shape[0] : 1, height: a, width: b, channels: c, planar: false };
  }
  if (shape.length > 2 && isColour(a) && (shape.length === 4 || a === 3)) {
    return { images: shape.length === 4 ? shape[0] : 1, height: b, width: c, channels: a, planar: true };
  }
  if (shape.length === 4 || Math.min(b, c) < SMALLEST_IMAGE || (isFloat && b !== c)) return null;
  return { images: shape.length === 3 ? a : 1, height: b, width: c, channels: 1, planar: true };
}

// Image `n` of an array node as ImageData. Bytes are shown as they are; what are no bytes, from their least value as
// black to their greatest as white.
export function pixels(array, layout, n) {
  const { height, width, channels, planar } = layout;
  const size = height * width;
  const values = elements(array, n * size * channels, (n + 1) * size * channels);
  let [low, scale] = [0, 1];
  if (array.dtype !== "uint8") {
    const finite = values.filter(Number.isFinite);
    const [least, most] = extremes(finite);
    [low, scale] = [least, most > least ? 255 / (most - least) : 0];
  }
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < size; pixel += 1) {
    for (let colour = 0; colour < 3; colour += 1) {
      const channel = channels === 3 ? colour : 0;
      const value = values[planar ? channel * size + pixel : pixel * channels + channel];
      image.data[4 * pixel + colour] = (value - low) * scale;
    }
    image.data[4 * pixel + 3] = 255;
  }
  return image;
}

// Least and greatest of numbers or BigInts, which may be too many for Math.min.
export function extremes(values) {
  let [least, most] = [values[0], values[0]];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return [least, most];
}
