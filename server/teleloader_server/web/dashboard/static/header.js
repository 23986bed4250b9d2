// Which server this is, and how it is.

import { byId, say } from "./dom.js";
import { duration } from "./format.js";

const STATES = {
  draining: ["Draining: rejects new loaders", "warn"],
  starting: ["Starting", "idle"],
  ready: ["Ready", "good"],
};

export function stateOf({ server, workers }) {
  if (server.draining) return "draining";
  return workers.length > 0 && workers.every((worker) => worker.state === "starting") ? "starting" : "ready";
}

export class Header {
  #state = byId("state");
  #since = null; // of the figures that are shown

  show(stats) {
    const { host, pid, version, uptime } = stats.server;
    say(byId("facts"), `${host} · process ${pid} · version ${version} · up ${duration(Math.floor(uptime))}`);
    document.title = `${host} · teleloader`;
    this.#say(...STATES[stateOf(stats)]);
    this.#since = new Date();
    document.body.classList.remove("stale");
  }

  lose() {
    const figures = this.#since === null ? "" : `; last update ${this.#since.toLocaleTimeString("en-GB")}`;
    this.#say(`Disconnected, reconnecting${figures}`, "bad");
    document.body.classList.add("stale");
  }

  #say(text, tone) {
    say(this.#state, text);
    this.#state.dataset.tone = tone;
  }
}
