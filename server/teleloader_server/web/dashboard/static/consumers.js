// A row for each consumer, those that need help first.

import { keyOfConsumer } from "./crowd.js";
import { bar, byId, list, make, say, sayName, table } from "./dom.js";
import { ago, bytes, count, duration, number, percent, plural } from "./format.js";
import { boundOf, byNeed, nameOf, waits } from "./diagnoses.js";

const ROWS = 25;
const TITLES = ["Consumer", "Dataset", "Rank", "Epoch", "Progress", "Batches/s", "Bytes/s", "Data wait", "Diagnosis"];

// Everything about it that has no column.
function more(consumer) {
  const { workers, confidence, evidence } = consumer.diagnosis;
  const parts = [
    `Total wait for batches that were not ready: ${duration(consumer.waiting)}`,
    `starved ${percent(consumer.starved_fraction)} of the time`,
    `response in transit ${percent(consumer.sending_fraction)} of the time`,
    `${plural(consumer.batches_sent, "batch", "batches")}, ${bytes(consumer.bytes_sent)} sent`,
    `last request ${ago(consumer.idle)}`,
  ];
  if (consumer.reconnects !== null) parts.push(plural(consumer.reconnects, "reconnect"));
  if (consumer.hedges !== null) parts.push(plural(consumer.hedges, "hedge"));
  if (workers !== null) parts.push(`${plural(workers, "worker")} would keep up`);
  const measured = evidence.map(({ name, value }) => `${name} ${value}`);
  const rests = measured.length > 0 ? ` Evidence (${percent(confidence)} confidence): ${measured.join("; ")}.` : "";
  return `${parts.join("; ")}. Loader ${consumer.loader.slice(0, 8)}.${rests}`;
}

class Diagnosis {
  #badge = make("span", { class: "badge" });
  #advice = make("span");
  #more = make("p", { class: "quiet" });
  element = make("details", { class: "diagnosis" }, make("summary", {}, this.#badge, " ", this.#advice), this.#more);

  update(consumer) {
    const { name, tone, sign } = boundOf(consumer);
    say(this.#badge, `${sign} ${name}`);
    this.#badge.dataset.tone = tone;
    say(this.#advice, consumer.diagnosis.advice);
    say(this.#more, more(consumer));
  }
}

export class ConsumerTable {
  #table = table("Consumers, sorted by bottleneck", TITLES);
  #filter = byId("filter").querySelector("input");
  #page = 0;
  #order = new Map(); // by key: the place in the order that is shown
  #consumers = [];

  constructor() {
    byId("consumer-table").append(this.#table.element);
    this.#filter.addEventListener("input", () => this.#turn(-this.#page));
    byId("previous").addEventListener("click", () => this.#turn(-1));
    byId("next").addEventListener("click", () => this.#turn(1));
  }

  show(_stats, consumers) {
    this.#consumers = this.#ordered(consumers);
    this.#fill();
  }

  // Nothing moves away from under the pointer, or from the row that has the focus.
  #ordered(consumers) {
    const body = this.#table.body;
    const sorted = [...consumers].sort(byNeed);
    if (body.matches(":hover") || body.contains(document.activeElement)) {
      const placed = (consumer) => this.#order.get(keyOfConsumer(consumer)) ?? Infinity;
      sorted.sort((one, other) => (placed(one) === placed(other) ? 0 : placed(one) - placed(other)));
    }
    this.#order = new Map(sorted.map((consumer, place) => [keyOfConsumer(consumer), place]));
    return sorted;
  }

  #turn(pages) {
    this.#page += pages;
    this.#fill();
  }

  #fill() {
    const words = this.#filter.value.toLowerCase().split(/\s+/);
    const text = (one) => `${one.run ?? ""} ${nameOf(one)} ${one.dataset} ${boundOf(one).name}`.toLowerCase();
    const found = this.#consumers.filter((one) => words.every((word) => text(one).includes(word)));
    const last = Math.max(0, Math.ceil(found.length / ROWS) - 1);
    this.#page = Math.min(Math.max(this.#page, 0), last);
    const start = this.#page * ROWS;
    const rows = found.slice(start, start + ROWS);
    list(this.#table.body, rows, keyOfConsumer, () => this.#row());
    byId("pager").hidden = last === 0;
    byId("previous").disabled = this.#page === 0;
    byId("next").disabled = this.#page === last;
    say(byId("page"), `${count(start + 1)} to ${count(start + rows.length)} of ${count(found.length)}`);
    this.#table.element.hidden = this.#consumers.length === 0;
    byId("filter").hidden = this.#consumers.length === 0;
  }

  #row() {
    const [name, dataset, rank, epoch, place, batches, size, waited, source] = TITLES.map(() => make("span"));
    source.className = "quiet";
    const run = make("strong");
    const progress = bar("Progress through the epoch", "progressbar");
    const diagnosis = new Diagnosis();
    const element = this.#table.row(
      make("span", {}, run, " ", name), dataset, rank, epoch, make("span", { class: "barred" }, progress.element, place), batches, size,
      make("span", {}, waited, " ", source), diagnosis.element,
    );
    return {
      element,
      update(consumer) {
        sayName(run, consumer.run ?? "");
        sayName(name, nameOf(consumer));
        say(dataset, consumer.dataset);
        say(rank, `${consumer.rank} of ${consumer.world_size}`);
        say(epoch, count(consumer.epoch));
        const at = count(consumer.position) + (consumer.batches === null ? "" : ` / ${count(consumer.batches)}`);
        say(place, at);
        progress.element.hidden = consumer.batches === null;
        progress.update(consumer.batches ? consumer.position / consumer.batches : 0, `batch ${at}`);
        say(batches, number(consumer.batches_per_second));
        say(size, bytes(consumer.bytes_per_second));
        say(waited, percent(waits(consumer)));
        say(source, consumer.data_wait_fraction === null ? "starved" : "");
        diagnosis.update(consumer);
      },
    };
  }
}
