// What user code raised, the latest first, each with its traceback and links to its batch and its sample.

import { byId, list, make, say } from "./dom.js";
import { ago, count, indices, plural } from "./format.js";

const HANDLING = { raised: "raised in the training loop", replaced: "replaced", skipped: "skipped" };

export async function errorRecords() {
  const answer = await fetch("v1/errors");
  if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
  return await answer.json();
}

function row() {
  const [type, where, message] = ["strong", "span", "span"].map((tag) => make(tag));
  const [about, links, traceback] = [make("p"), make("p"), make("pre", { tabindex: 0 })];
  where.className = about.className = "quiet";
  const [batch, sample] = [make("a"), make("a")];
  links.append(batch, " ", sample);
  return {
    element: make("details", { class: "error" }, make("summary", {}, type, " ", where, " ", message), about, links, traceback),
    update(error) {
      const one = error.sample === null ? "" : `, sample ${error.sample}`;
      say(type, error.type);
      say(where, `${error.dataset}, epoch ${count(error.epoch)}, batch ${count(error.batch)}${one}, ${ago(error.age)}`);
      say(message, error.message.split("\n")[0]);
      const run = error.run === null ? "" : `, run ${error.run}`;
      const other = error.replacement === null ? "" : ` by sample ${error.replacement}`;
      const at = new Date(error.time * 1000).toLocaleTimeString();
      say(about, `Error ${error.number} at ${at}: ${HANDLING[error.handling]}${other}. Worker ${error.worker}${run}, loader ` +
        `${error.loader.slice(0, 8)}. Indices of the batch: ${indices(error.indices)}. Message: ${error.message}`);
      say(batch, error.batch_preview === null ? "" : `Preview batch ${error.batch} of epoch ${error.epoch}`);
      say(sample, error.sample_preview === null ? "" : `Preview sample ${error.sample} alone`);
      batch.href = `#error-${error.number}`;
      sample.href = `#error-${error.number}-sample`;
      batch.hidden = error.batch_preview === null;
      sample.hidden = error.sample_preview === null;
      say(traceback, error.traceback || "No traceback: of replaced and skipped samples, workers report type and message only.");
    },
  };
}

export class ErrorList {
  #known = null; // the counts for which the records were requested
  #errors = [];
  #total = 0;
  #requested = 0;

  async show({ server, datasets }) {
    const counts = datasets.flatMap((one) => one.errors.map((error) => `${one.dataset} ${error.type} ${error.count}`));
    const known = `${server.host} ${server.pid}\n${counts.join("\n")}`;
    if (known !== this.#known) {
      this.#known = known;
      await this.#request();
    }
    const elapsed = (performance.now() - this.#requested) / 1000;
    list(byId("error-list"), this.#errors.map((one) => ({ ...one, age: one.age + elapsed })), ({ number }) => number, row);
    byId("no-errors").hidden = this.#errors.length > 0;
    byId("more-errors").hidden = this.#total <= this.#errors.length;
    if (this.#errors.length === 0) return;
    say(byId("more-errors"), `The last ${this.#errors.length} of ${plural(this.#total, "error")}.`);
  }

  async #request() {
    try {
      const { errors, total } = await errorRecords();
      [this.#errors, this.#total, this.#requested] = [errors, total, performance.now()];
    } catch {
      this.#known = null; // retry with the next record
    }
  }
}
