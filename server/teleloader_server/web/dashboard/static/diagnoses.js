// Names, colours and order of diagnoses.

import { count } from "./format.js";

const BOUNDS = {
  workers: { name: "workers", tone: "bad", sign: "▲" },
  io: { name: "I/O", tone: "bad", sign: "▲" },
  machine: { name: "machine", tone: "bad", sign: "▲" },
  memory: { name: "memory", tone: "bad", sign: "▲" },
  prefetch: { name: "prefetch", tone: "bad", sign: "▲" },
  server: { name: "server", tone: "bad", sign: "▲" },
  network: { name: "network", tone: "warn", sign: "◆" },
  client: { name: "client", tone: "warn", sign: "◆" },
  training: { name: "training", tone: "good", sign: "●" },
  unknown: { name: "unknown", tone: "idle", sign: "…" },
  idle: { name: "idle", tone: "idle", sign: "…" },
  finished: { name: "finished", tone: "idle", sign: "✓" },
};
const ORDER = Object.keys(BOUNDS);

const keyOf = ({ diagnosis }) => (diagnosis.bottleneck in BOUNDS ? diagnosis.bottleneck : "unknown");

export const labelOf = (bottleneck) => BOUNDS[bottleneck] ?? BOUNDS.unknown;

export const boundOf = (consumer) => BOUNDS[keyOf(consumer)];

// A consumer's name is chosen by its client: clients with different tokens may choose the same one.
export const nameOf = ({ consumer, token }) => (token === "anyone" ? consumer : `${consumer} (${token})`);

// The name with that of the training run, which is chosen by the client, too.
export const runAndName = (one) => (one.run == null ? nameOf(one) : `${one.run}, ${nameOf(one)}`);

// Fraction of the time for which training waits for data, if known.
export const waits = (consumer) => consumer.data_wait_fraction ?? consumer.starved_fraction;

// The largest wait first, in steps of 10 %, so that rows do not swap all the time.
export function byNeed(one, other) {
  return (
    ORDER.indexOf(keyOf(one)) - ORDER.indexOf(keyOf(other)) ||
    Math.round(waits(other) * 10) - Math.round(waits(one) * 10) ||
    nameOf(one).localeCompare(nameOf(other)) ||
    one.rank - other.rank
  );
}

// "3 workers, 1 training"
export function summary(consumers) {
  const parts = ORDER.map((bottleneck) => [bottleneck, consumers.filter((one) => keyOf(one) === bottleneck).length]);
  return parts.filter(([, many]) => many > 0).map(([bottleneck, many]) => `${count(many)} ${BOUNDS[bottleneck].name}`).join(", ");
}
