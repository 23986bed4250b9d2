// The links of this page: #error-N and #slow-DATASET-INDEX open a preview, with "-sample" of the sample alone;
// #worker-N and #worker-N-KEY open the page of a worker.

import { errorRecords } from "./errors.js";
import { keyOfSample, slowSamples } from "./slow.js";

const MOST = 1000;

export class Links {
  #batch;
  #worker;
  #isReady = false;

  constructor(batch, worker) {
    this.#batch = batch;
    this.#worker = worker;
    window.addEventListener("hashchange", () => this.#follow());
  }

  // The first figures: the page is signed in, and can follow the link with which it was opened.
  show() {
    if (this.#isReady) return;
    this.#isReady = true;
    this.#follow();
  }

  async #follow() {
    if (!this.#isReady) return;
    const hash = location.hash.slice(1);
    const worker = hash.match(/^worker-(\d+)(?:-([0-9a-f]+))?$/);
    this.#worker.open(worker === null ? null : { worker: Number(worker[1]), loader: worker[2] ?? null });
    const isSample = hash.endsWith("-sample");
    const name = isSample ? hash.slice(0, -"-sample".length) : hash;
    try {
      if (name.startsWith("error-")) await this.#open(await errorOf(name), isSample, `Error ${name.slice(6)}. `);
      if (name.startsWith("slow-")) await this.#open(await slowOf(name), isSample, "Slow sample. ");
    } catch (error) {
      this.#batch.refuse(`Request failed: ${error.message}`);
    }
  }

  async #open(found, isSample, title) {
    if (found === undefined) {
      this.#batch.refuse("The server does not list this error or sample: only the latest errors and the slowest samples are kept. Select a listed one.");
      return;
    }
    const preview = isSample ? found.sample_preview : found.batch_preview;
    if (preview === null) this.#batch.refuse(`${title}The batch cannot be loaded again: its dataset is iterable-style, or its index list is unknown.`);
    else await this.#batch.open(preview, title);
  }
}

async function errorOf(name) {
  const { errors } = await errorRecords();
  return errors.find(({ number }) => name === `error-${number}`);
}

async function slowOf(name) {
  const { samples } = await slowSamples(MOST);
  return samples.find((one) => name === `slow-${keyOfSample(one)}`);
}
