// The servers of the fleet: those that announced themselves to this server, and those of the same supervisor. Only this
// server is read: the browser would send this server's session cookie to other ports of the host.

import { byId, list, make, say, sayName } from "./dom.js";
import { count, plural } from "./format.js";
import { stateOf } from "./header.js";

const INTERVAL_MS = 5_000;
const MAX_SHOWN = 200;
const TONES = { ready: "good", draining: "warn" };

// Return the servers by URL, this one included. The others announce themselves only while they are ready. Of the servers
// of the same supervisor, this one knows only the ports, unless they announce themselves as well.
export function serversOf(page, own, ports, listed, instance) {
  const isListed = listed.some((server) => server.instance === instance);
  const others = listed.filter((server) => server.instance !== instance).map(({ url }) => [url, { state: "ready" }]);
  const siblings = isListed ? [] : siblingsOf(page, ports).map((url) => [url, { state: "unknown" }]);
  const found = new Map([...siblings, ...others, [page, { state: own, isOwn: true }]]);
  const servers = [...found].map(([url, server]) => ({ url, ...server }));
  return servers.sort((one, other) => one.url.localeCompare(other.url, "en", { numeric: true }));
}

// Return the URLs at other ports of the page's host; none if a proxy or container maps the port of the page.
function siblingsOf(page, ports) {
  const url = new URL(page);
  const port = Number(url.port) || { "http:": 80, "https:": 443 }[url.protocol];
  if (!ports?.includes(port)) return [];
  return ports.map((other) => {
    url.port = other;
    return withoutSlash(url.href);
  });
}

const withoutSlash = (url) => url.replace(/\/$/, "");

// Announced URLs are untrusted: a link must not run a script.
const isLink = (url) => /^https?:\/\//.test(url);

function item({ url, isOwn }) {
  const name = !isOwn && isLink(url) ? make("a", { href: url, rel: "noreferrer" }) : make("span");
  const state = make("span", { class: "badge" });
  sayName(name, url);
  return {
    element: make("li", {}, state, make("span", {}, name, isOwn ? make("strong", {}, " this server") : "")),
    update(server) {
      say(state, server.state);
      state.dataset.tone = TONES[server.state] ?? "idle";
    },
  };
}

export class ServerList {
  #listed = [];
  #instance = null;
  #read = -Infinity;

  show(stats) {
    this.#refresh();
    const page = withoutSlash(new URL(".", document.baseURI).href);
    const servers = serversOf(page, stateOf(stats), stats.server.ports, this.#listed, this.#instance);
    byId("servers").hidden = servers.length === 1;
    say(byId("servers-title"), plural(servers.length, "server"));
    list(byId("server-list"), servers.slice(0, MAX_SHOWN), ({ url, isOwn }) => `${isOwn} ${url}`, item);
    byId("more-servers").hidden = servers.length <= MAX_SHOWN;
    say(byId("more-servers"), `${count(servers.length - MAX_SHOWN)} more servers are not shown.`);
  }

  // Read the announced servers, and which of them this one is.
  async #refresh() {
    if (Date.now() - this.#read < INTERVAL_MS) return;
    this.#read = Date.now();
    try {
      const [{ servers }, { instance }] = await Promise.all(["v1/servers", "healthz"].map(fetched));
      [this.#listed, this.#instance] = [servers, instance];
    } catch {
      // the known servers remain; the state of the page shows that this server does not respond
    }
  }
}

async function fetched(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`HTTP status ${response.status}`);
  return response.json();
}
