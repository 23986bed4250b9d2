// Comparison of the servers of a fleet, as `teleloader stats` does it. No elements.

const SLOW_WORK = 1.5; // time per batch, relative to the median of the other servers, from which a server is slow
const SLOW_RATE = 0.5; // batches/s, relative to their median, below which it is slow
const FEWEST = 0.1; // batches/s below which rates are not compared
const UNEXPLAINED = ["unknown", "idle", "finished"];

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const middle = sorted.length / 2;
  if (sorted.length === 0) return null;
  return sorted.length % 2 === 1 ? sorted[Math.floor(middle)] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// Time of a worker per batch in seconds; null if it is unknown.
function workOf({ busy, workers, batches_per_second: rate }) {
  return busy === null || workers === 0 || rate < FEWEST ? null : (busy * workers) / rate;
}

// Return the servers with their share and skew, those that need attention first.
export function compared(servers) {
  const known = servers.filter(({ summary }) => summary != null);
  const total = known.reduce((sum, { summary }) => sum + summary.batches_per_second, 0);
  const rows = servers.map((server) => {
    if (server.summary == null) return { ...server, share: null, skew: null };
    const { summary } = server;
    const serves = ({ loaders }) => loaders.some((loader) => summary.loaders.includes(loader));
    const others = known.filter((other) => other !== server && serves(other.summary)).map((other) => other.summary);
    const share = total > 0 ? summary.batches_per_second / total : null;
    return { ...server, share, skew: others.length === 0 ? null : skewOf(summary, others) };
  });
  return rows.sort((one, other) => needOf(one) - needOf(other) || one.url.localeCompare(other.url, "en", { numeric: true }));
}

function skewOf(summary, others) {
  const rates = median(others.map((other) => other.batches_per_second));
  const works = median(others.map(workOf).filter((work) => work !== null));
  const own = workOf(summary);
  const rate = rates >= FEWEST ? summary.batches_per_second / rates : null;
  const work = own !== null && works ? own / works : null;
  const isSlow = (work ?? 0) >= SLOW_WORK || (rate !== null && rate <= SLOW_RATE);
  return { servers: others.length, rate, work, ownWork: own, medianWork: works, isSlow };
}

function needOf({ lostFor, skew, summary }) {
  if (lostFor != null) return -3;
  if (skew?.isSlow) return -2;
  return summary == null ? 1 : -(summary.data_wait ?? 0);
}

// Return the server whose diagnosis counts for the training run: the one that explains most of the wait.
export function diagnosing(servers) {
  const known = servers.filter(({ summary }) => summary?.bottleneck != null);
  const explained = known.filter(({ summary }) => !UNEXPLAINED.includes(summary.bottleneck));
  const order = ({ summary: one }, { summary: other }) =>
    other.confidence - one.confidence || other.bytes_per_second - one.bytes_per_second;
  return (explained.length > 0 ? explained : known).sort(order)[0] ?? null;
}
