// Samples that took unusually long, slowest first.

import { byId, list, make, say, table } from "./dom.js";
import { count, duration, number, plural, UNKNOWN } from "./format.js";

const ROWS = 20;
const TITLES = ["Sample", "Dataset", "Time", "× median", "Slow fetches", "Last in", "Preview"];

export async function slowSamples(limit) {
  const answer = await fetch(`v1/slow-samples?limit=${limit}`);
  if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
  return await answer.json();
}

export const keyOfSample = ({ dataset, index }) => `${encodeURIComponent(dataset)}-${index}`;

export class SlowList {
  #table = table("Slow samples, slowest first", TITLES);
  #known = null;
  #samples = [];
  #total = 0;

  constructor() {
    byId("slow-list").append(this.#table.element);
  }

  async show({ server, datasets }) {
    const known = `${server.host} ${server.pid} ${datasets.map(({ samples_slow, batches_early }) => `${samples_slow} ${batches_early}`)}`;
    if (known !== this.#known) {
      this.#known = known;
      try {
        ({ samples: this.#samples, total: this.#total } = await slowSamples(ROWS));
      } catch {
        this.#known = null; // retry with the next record
      }
    }
    list(this.#table.body, this.#samples, keyOfSample, () => this.#row());
    this.#table.element.hidden = this.#samples.length === 0;
    const many = this.#total > this.#samples.length ? `The slowest ${this.#samples.length} of ${plural(this.#total, "slow sample")}.` : "";
    say(byId("slow-note"), this.#samples.length === 0 ? "None: no sample took longer than 50 ms and twice the median of its batches." : many);
  }

  #row() {
    const [index, dataset, time, ratio, times, last] = TITLES.slice(1).map(() => make("span"));
    const [sample, batch] = [make("a"), make("a")];
    const element = this.#table.row(index, dataset, time, ratio, times, last, make("span", {}, sample, " ", batch));
    return {
      element,
      update(slow) {
        say(index, `${slow.index}`);
        say(dataset, slow.dataset);
        say(time, duration(slow.seconds));
        say(ratio, slow.typical ? number(slow.seconds / slow.typical) : UNKNOWN);
        say(times, count(slow.times));
        say(last, slow.batch === null ? UNKNOWN : `batch ${count(slow.batch)}, epoch ${count(slow.epoch)}`);
        say(sample, "Sample");
        say(batch, "Batch");
        sample.hidden = slow.sample_preview === null;
        batch.hidden = slow.batch_preview === null;
        sample.href = `#slow-${keyOfSample(slow)}-sample`;
        batch.href = `#slow-${keyOfSample(slow)}`;
        sample.setAttribute("aria-label", `Preview sample ${slow.index}`);
        batch.setAttribute("aria-label", `Preview the batch of sample ${slow.index}`);
      },
    };
  }
}
