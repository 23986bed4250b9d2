// The diagnosis: the bottleneck of training, and what to change.

import { byId, make, say } from "./dom.js";
import { count, plural } from "./format.js";
import { boundOf, byNeed, runAndName, summary } from "./diagnoses.js";

const capital = (text) => text[0].toUpperCase() + text.slice(1);

export class Answer {
  #section = byId("answer");
  #bottleneck = make("strong");
  #who = make("span", { class: "who" });
  #advice = make("span", { class: "advice" });
  #example = make("code");
  #told = null;

  constructor() {
    byId("sentence").replaceChildren(this.#bottleneck, " ", this.#who, " ", this.#advice);
    byId("sentence").after(this.#example);
    this.#example.hidden = true;
  }

  show(stats, consumers) {
    this.#example.hidden = consumers.length > 0;
    if (consumers.length === 0) this.#showNobody(stats);
    else this.#showWorst([...consumers].sort(byNeed)[0], consumers, stats.consumers_total);
  }

  #showNobody(stats) {
    const dataset = stats.datasets[0]?.dataset ?? "train";
    const url = document.baseURI.replace(/[?#].*$/, "").replace(/\/$/, "");
    this.#say("No consumers.", "", "To load batches from this server:", "idle");
    const remote = `RemoteDataset(${JSON.stringify(url)}, ${JSON.stringify(dataset)})`;
    say(this.#example, `loader = DataLoader(${remote}, batch_size=32)`);
    say(byId("counts"), "");
  }

  #showWorst(worst, consumers, total) {
    const { name, tone, sign } = boundOf(worst);
    const rank = worst.world_size > 1 ? `, rank ${worst.rank}` : "";
    this.#say(`${sign} ${capital(name)}`, `${runAndName(worst)}${rank} of ${worst.dataset}:`, worst.diagnosis.advice, tone);
    const known = consumers.length < total ? ` (${count(consumers.length)} loaded so far)` : "";
    say(byId("counts"), `${plural(total, "consumer")}${known}: ${summary(consumers)}.`);
  }

  #say(bottleneck, who, advice, tone) {
    say(this.#bottleneck, bottleneck);
    say(this.#who, who);
    say(this.#advice, advice);
    this.#section.dataset.tone = tone;
    // announced when the diagnosis changes, not whenever a figure in it does
    if (this.#told !== bottleneck + who) say(byId("announced"), `${bottleneck} ${who} ${advice}`);
    this.#told = bottleneck + who;
  }
}
