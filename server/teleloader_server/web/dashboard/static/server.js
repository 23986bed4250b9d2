// The server's own means: memory first, because when it is full nothing is made ahead.

import { bar, byId, list, make, say } from "./dom.js";
import { bytes, duration, number, plural } from "./format.js";

const LATE = 0.01; // from here on, requests wait for the server's own process

function figures(server) {
  const late = server.event_loop_lag >= LATE;
  return [
    ["Sent", `${number(server.batches_per_second)} batches/s, ${bytes(server.bytes_per_second)}/s`],
    ["CPUs", `${number(server.cpu)} of ${server.cpus} in use`],
    ["Memory of all processes", `${bytes(server.pss)} (PSS)`],
    ["Responses in transit", bytes(server.memory_sending)],
    ["Memory mapped for large batches", bytes(server.memory_mapped)],
    ["Memory lent to clients on this machine", bytes(server.memory_lent)],
    ["Event loop lag", duration(server.event_loop_lag) + (late ? ": the server process is overloaded" : ""), late],
    ["Connections", number(server.connections)],
    ["Workers", server.num_workers === 0 ? "none: loads in its own process" : number(server.num_workers)],
    ["Worker restarts", plural(server.worker_restarts, "restart"), server.worker_restarts > 0],
  ];
}

function figure([title]) {
  const value = make("dd");
  return {
    element: make("div", {}, make("dt", {}, title), value),
    update([, text, bad = false]) {
      say(value, text);
      value.classList.toggle("bad", bad);
    },
  };
}

export class ServerFigures {
  #bar = bar("Batch memory");
  #text = make("span");

  constructor() {
    byId("memory").append(make("span", { class: "label" }, "Batch memory"), this.#text, this.#bar.element);
  }

  show({ server }) {
    const share = server.memory_used / server.memory_budget;
    const text = `${bytes(server.memory_used)} of ${bytes(server.memory_budget)}`;
    say(this.#text, text);
    this.#bar.update(share, text);
    list(byId("figures"), figures(server), ([title]) => title, figure);
  }
}
