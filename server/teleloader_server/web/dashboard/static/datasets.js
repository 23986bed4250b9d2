// How long each stage of a batch takes, dataset by dataset, and which batches took longest.

import { bar, byId, list, make, say, table } from "./dom.js";
import { ago, count, duration, indices, number, plural } from "./format.js";

const QUANTILES = ["p50", "p95", "p99"];

function summary(dataset) {
  const length = dataset.length === null ? "length unknown" : plural(dataset.length, "sample");
  return `${dataset.kind}-style, ${length}. ${number(dataset.samples_per_second)} samples/s.`;
}

function totals(dataset) {
  const parts = [
    `${plural(dataset.batches_computed, "batch", "batches")} computed`,
    `${count(dataset.batches_sent)} sent`,
    `${count(dataset.batches_failed)} failed`,
    `${count(dataset.batches_retried)} restarted`,
    `${count(dataset.batches_early)} started early`,
    `${count(dataset.batches_backed_up)} with a backup`,
    `${plural(dataset.samples_substituted, "sample")} skipped or replaced`,
    `${count(dataset.samples_slow)} slow`,
    `${plural(dataset.samples_computed, "sample")} in total`,
  ];
  const cached = dataset.cache_hits + dataset.cache_misses;
  const share = Math.round((100 * dataset.cache_hits) / cached);
  const cache = cached > 0 ? ` Cache: ${share} % of ${plural(cached, "sample")} read, ${duration(dataset.cache_saved)} saved.` : "";
  const padding = dataset.padding_fraction == null ? "" : ` Padding: ${Math.round(100 * dataset.padding_fraction)} %.`;
  return `${parts.join(", ")}.${cache}${padding}`;
}

// Several versions, newest first; "" for a single one.
function versions(dataset) {
  if (dataset.versions.length < 2) return "";
  const ordered = dataset.versions.toSorted((a, b) => b.newest - a.newest || b.revision - a.revision);
  const texts = ordered.map(({ version, newest, loaders, idle }) =>
    `${version || "unnamed"} (${newest ? "newest" : `last used ${ago(idle)}`}, ${plural(loaders, "loader")})`);
  return `Versions: ${texts.join(", ")}.`;
}

class StageTable {
  #table;

  constructor(name) {
    this.#table = table(`Time per batch of ${name}`, ["Stage", ...QUANTILES, "longest"]);
    this.element = this.#table.element;
    this.element.className = "stages";
  }

  update(dataset) {
    const stages = Object.entries(dataset.stages);
    const longest = Math.max(...stages.map(([, latency]) => latency.p99));
    const items = stages.map(([stage, latency]) => ({ stage, longest, ...latency }));
    list(this.#table.body, items, ({ stage }) => stage, ({ stage }) => this.#row(stage));
  }

  #row(stage) {
    const cells = QUANTILES.map((quantile) => ({ bar: bar(`${stage}, ${quantile}`), text: make("span") }));
    const longest = make("span");
    const barred = cells.map((cell) => make("span", { class: "barred" }, cell.bar.element, cell.text));
    return {
      element: this.#table.row(stage, ...barred, longest),
      update(item) {
        QUANTILES.forEach((quantile, i) => {
          const text = item.count === 0 ? "none yet" : duration(item[quantile]);
          say(cells[i].text, text);
          cells[i].bar.update(item.longest > 0 ? item[quantile] / item.longest : 0, text);
        });
        say(longest, item.count === 0 ? "" : duration(item.max));
      },
    };
  }
}

class SlowestBatches {
  #table;

  constructor(name) {
    this.#table = table(`Slowest batches of ${name}`, ["Batch", "Fetch", "Slowest sample", "Indices"]);
    this.element = make("details", {}, make("summary", {}, "Slowest batches"), this.#table.element);
  }

  update({ slowest }) {
    this.element.hidden = slowest.length === 0;
    list(this.#table.body, slowest, (slow) => `${slow.loader} ${slow.epoch} ${slow.batch}`, () => this.#row());
  }

  #row() {
    const [address, seconds, sample, held] = [0, 1, 2, 3].map(() => make("span"));
    return {
      element: this.#table.row(address, seconds, sample, held),
      update(slow) {
        say(address, `batch ${slow.batch} of epoch ${slow.epoch}, loader ${slow.loader.slice(0, 8)}`);
        say(seconds, duration(slow.seconds));
        say(sample, slow.sample ?? "");
        say(held, indices(slow.indices));
      },
    };
  }
}

function card({ dataset: name }) {
  const [about, published, sums] = [make("p"), make("p"), make("p", { class: "quiet" })];
  const parts = [new StageTable(name), new SlowestBatches(name)];
  return {
    element: make("article", {}, make("h3", {}, name), about, published, ...parts.map((part) => part.element), sums),
    update(dataset) {
      say(about, summary(dataset));
      say(published, versions(dataset));
      say(sums, totals(dataset));
      for (const part of parts) part.update(dataset);
    },
  };
}

export class DatasetList {
  show({ datasets }) {
    list(byId("dataset-list"), datasets, ({ dataset }) => dataset, card);
  }
}
