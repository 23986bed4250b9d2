// What user code raised, the latest first, each with its traceback.

import { byId, list, make, say } from "./dom.js";
import { ago, indices, plural } from "./format.js";

function row() {
  const [type, times, message, where, traceback] = ["strong", "span", "span", "p", "pre"].map((tag) => make(tag));
  times.className = where.className = "quiet";
  traceback.tabIndex = 0; // it scrolls, so it must be within reach of the keyboard
  return {
    element: make("details", { class: "error" }, make("summary", {}, type, " ", times, " ", message), where, traceback),
    update(error) {
      say(type, error.type);
      say(times, `${plural(error.count, "time")}, last ${ago(error.age)}, ${error.dataset}`);
      say(message, error.last.split("\n")[0]);
      const sample = Number.isInteger(error.sample) ? `Last sample: ${error.sample}. ` : "";
      say(where, `${sample}Last batch: indices ${indices(error.indices)}. Message: ${error.last}`);
      say(traceback, error.traceback);
    },
  };
}

export class ErrorList {
  show({ datasets }) {
    const errors = datasets.flatMap(({ dataset, errors: found }) => found.map((error) => ({ dataset, ...error })));
    errors.sort((one, other) => one.age - other.age);
    list(byId("error-list"), errors, (error) => `${error.dataset}\n${error.type}`, row);
    byId("no-errors").hidden = errors.length > 0;
  }
}
