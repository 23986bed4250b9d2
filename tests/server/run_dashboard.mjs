// Does with the dashboard's own modules what a test asks on standard input, and prints what came of it, as JSON:
// {"frames": [path], "shapes": [[dtype, shape]], "numbers": [[function of format.js, argument]],
// "timelines": [[response of /stats/history]]}.

import { readFileSync } from "node:fs";
import { elements, imagesIn } from "./arrays.js";
import * as format from "./format.js";
import { readFrame } from "./frame.js";
import { Points } from "./points.js";

// What JSON cannot say is tagged, as in the test vectors.
function tagged(value) {
  if (typeof value === "bigint") {
    const isSmall = value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER;
    return isSmall ? Number(value) : { $int: value.toString() };
  }
  if (typeof value === "number") {
    if (Number.isNaN(value)) return { $float: "nan" };
    if (!Number.isFinite(value)) return { $float: value > 0 ? "inf" : "-inf" };
    return Object.is(value, -0) ? { $float: "-0.0" } : value;
  }
  if (value instanceof Uint8Array) return { $bytes: Buffer.from(value).toString("hex") };
  if (Array.isArray(value)) return value.map(tagged);
  if (value === null || typeof value !== "object") return value;
  if (value.kind === "array") return { ...tagged({ ...value, kind: "segment" }), kind: "array", values: valuesOf(value) };
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, tagged(item)]));
}

const valuesOf = (array) => tagged(elements(array, 0, Infinity));

function attempt(path) {
  try {
    return tagged(readFrame(new Uint8Array(readFileSync(path))));
  } catch (error) {
    return { error: error.message };
  }
}

// The points after each response was appended, or loaded where it is of another process.
function timeline(responses) {
  const found = new Points();
  for (const response of responses) if (!found.append(response)) found.load(response);
  const { times, columns, marks, labels } = found.between(0, Number.MAX_VALUE);
  return { times, columns, marks, labels, next: found.next };
}

const { frames = [], shapes = [], numbers = [], timelines = [] } = JSON.parse(readFileSync(0, "utf-8"));
console.log(JSON.stringify({
  frames: frames.map(attempt),
  shapes: shapes.map(([dtype, shape]) => imagesIn({ dtype, shape })),
  timelines: timelines.map(timeline),
  numbers: numbers.map(([name, ...given]) => format[name](...given)),
}));
