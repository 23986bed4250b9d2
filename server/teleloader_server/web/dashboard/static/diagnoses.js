// Names, colours and order of diagnoses.

const BOUNDS = {
  loader: { name: "loader-bound", tone: "bad", sign: "▲" },
  network: { name: "network-bound", tone: "warn", sign: "◆" },
  balanced: { name: "balanced", tone: "good", sign: "=" },
  training: { name: "training-bound", tone: "good", sign: "●" },
  unknown: { name: "no diagnosis yet", tone: "idle", sign: "…" },
  finished: { name: "finished", tone: "idle", sign: "✓" },
};
const ORDER = Object.keys(BOUNDS);

const keyOf = ({ diagnosis, finished }) => (finished ? "finished" : diagnosis.bottleneck in BOUNDS ? diagnosis.bottleneck : "unknown");

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

// "3 loader-bound, 1 balanced"
export function summary(consumers) {
  const parts = ORDER.map((bottleneck) => [bottleneck, consumers.filter((one) => keyOf(one) === bottleneck).length]);
  return parts.filter(([, many]) => many > 0).map(([bottleneck, many]) => `${many} ${BOUNDS[bottleneck].name}`).join(", ");
}
