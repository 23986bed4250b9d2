// All consumers of a server, which returns up to a hundred per response.

export const keyOfConsumer = (consumer) =>
  `${consumer.token}\n${consumer.consumer}\n${consumer.loader}\n${consumer.epoch}`;

// The stream has the most recently active consumers. After each event, one page of the others is requested in turn, so
// the cost of watching a server does not grow with the number of its consumers.
export class Crowd {
  #seen = new Map(); // by key: [consumer, the round in which it was seen]
  #round = 0;
  #offset = 0;
  #asking = false;

  // What is known after an event of the stream: the others are those of this round and of the one before.
  take(stats) {
    const first = stats.consumers.length;
    if (stats.consumers_total <= first) {
      this.#seen.clear();
    } else {
      this.#ask(first);
      for (const [name, [, round]] of this.#seen) if (round < this.#round - 1) this.#seen.delete(name);
    }
    const found = new Map([...this.#seen].map(([name, [consumer]]) => [name, consumer]));
    for (const consumer of stats.consumers) found.set(keyOfConsumer(consumer), consumer);
    return [...found.values()];
  }

  async #ask(first) {
    if (this.#asking) return;
    this.#asking = true;
    try {
      this.#offset = Math.max(this.#offset, first);
      const answer = await fetch(`stats?limit=100&offset=${this.#offset}`);
      if (!answer.ok) return; // the stream will say what is wrong
      const { consumers, consumers_total: total } = await answer.json();
      for (const consumer of consumers) this.#seen.set(keyOfConsumer(consumer), [consumer, this.#round]);
      this.#offset += consumers.length;
      if (consumers.length === 0 || this.#offset >= total) {
        this.#offset = 0;
        this.#round += 1;
      }
    } catch {
      // no connection: the stream says so
    } finally {
      this.#asking = false;
    }
  }
}
