// Formatting of numbers. `UNKNOWN` replaces missing ones.

export const UNKNOWN = "–";

const grouped = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// A whole number, with separators.
export function count(value) {
  return value === null ? UNKNOWN : grouped[0].format(value);
}

// Three digits or so: 1,234 and 56.7 and 0.89.
export function number(value) {
  if (value === null) return UNKNOWN;
  const size = Math.abs(value);
  return grouped[size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2].format(value);
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < BYTES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count(value) : number(value)} ${BYTES[unit]}`;
}

export function percent(share) {
  if (share === null) return UNKNOWN;
  return share > 0 && share < 0.01 ? "<1 %" : `${Math.round(share * 100)} %`;
}

export function duration(seconds) {
  if (seconds === null) return UNKNOWN;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${number(seconds * 1e6)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3)} ms`;
  if (seconds < 60) return `${number(seconds)} s`;
  const whole = Math.floor(seconds);
  if (seconds < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (seconds < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// How long ago, in whole units: what changes ten times a second cannot be read.
export function ago(seconds) {
  return seconds < 1 ? "now" : `${duration(seconds < 60 ? Math.floor(seconds) : seconds)} ago`;
}

// "1 batch", "2 batches".
export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

// Indices, of which the server says the first twenty.
export function indices(list) {
  if (list.length === 0) return UNKNOWN;
  return list.join(", ") + (list.length >= 20 ? ", …" : "");
}
