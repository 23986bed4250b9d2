// The servers of the fleet: those that announced themselves to this server, and those of the same supervisor. Only this
// server is read: the browser would send this server's session cookie to other ports of the host. The figures of the
// others are in their announcements.

import { labelOf } from "./diagnoses.js";
import { byId, list, make, say, sayName, table } from "./dom.js";
import { compared, diagnosing } from "./fleet.js";
import { count, duration, number, percent, plural, UNKNOWN } from "./format.js";
import { stateOf } from "./header.js";

const INTERVAL_MS = 5_000;
const MAX_SHOWN = 200;
const TONES = { ready: "good", draining: "warn" };

// Return the servers by URL, this one included. The others announce themselves only while they are ready. Of the servers
// of the same supervisor, this one knows only the ports, unless they announce themselves as well.
export function serversOf(page, own, ports, listed, instance) {
  const isListed = listed.some((server) => server.instance === instance);
  const others = listed
    .filter((server) => server.instance !== instance)
    .map(({ url, summary, lost_for: lostFor }) => [url, { state: "ready", summary, lostFor }]);
  const siblings = isListed ? [] : siblingsOf(page, ports).map((url) => [url, { state: "unknown" }]);
  const found = new Map([...siblings, ...others, [page, { state: own, isOwn: true }]]);
  return [...found].map(([url, server]) => ({ url, ...server }));
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

// The figures of this server, as the others announce theirs.
function ownSummary({ server, workers, consumers }) {
  const active = consumers.filter(({ diagnosis }) => !["idle", "finished"].includes(diagnosis.bottleneck));
  const waiting = active.map((one) => one.data_wait_fraction).filter((wait) => wait !== null);
  const explaining = (one) => (["unknown", "idle", "finished"].includes(one.bottleneck) ? 0 : 1 + one.confidence);
  const diagnosis = active.map((one) => one.diagnosis).sort((one, other) => explaining(other) - explaining(one))[0];
  const mean = (values) => (values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length);
  return {
    version: server.version,
    uptime: server.uptime,
    workers: workers.length,
    batches_per_second: server.batches_per_second,
    bytes_per_second: server.bytes_per_second,
    busy: mean(workers.map((worker) => worker.busy_fraction)),
    data_wait: mean(waiting),
    bottleneck: diagnosis?.bottleneck ?? null,
    confidence: diagnosis?.confidence ?? 0,
    advice: diagnosis?.advice ?? "",
    loaders: [...new Set(active.map(({ loader }) => loader))],
  };
}

const TITLES = ["Server", "State", "Batches/s", "Share", "Busy", "Data wait", "Diagnosis", "Skew", "Version", "Up"];

function stateText({ state, lostFor, skew }) {
  if (lostFor != null) return [`down for ${duration(Math.floor(lostFor))}`, "bad"];
  return skew?.isSlow ? ["slow", "warn"] : [state, TONES[state] ?? "idle"];
}

// Why a server needs attention, with the figures on which it rests.
function reason({ lostFor, skew, summary }) {
  if (lostFor != null) return `No announcement since ${new Date(Date.now() - 1000 * lostFor).toLocaleTimeString("en-GB")}.`;
  if (!skew?.isSlow) return "";
  const others = `the median of ${plural(skew.servers, "other server")}`;
  const work = skew.work === null ? "" : `${duration(skew.ownWork)} of a worker's time per batch, ${number(skew.work)} times ${others} (${duration(skew.medianWork)}). `;
  const rate = skew.rate === null ? "" : `${number(summary.batches_per_second)} batches/s, ${number(skew.rate)} times ${others}.`;
  return work + rate;
}

function row(made, { url, isOwn }) {
  const name = !isOwn && isLink(url) ? make("a", { href: url, rel: "noreferrer" }) : make("span");
  const [why, badge, rate, share, busy, wait, diagnosis, skew, version, up] = TITLES.map(() => make("span"));
  why.className = "quiet";
  badge.className = "badge";
  sayName(name, url);
  const first = make("span", {}, name, isOwn ? make("strong", {}, " this server") : "", " ", why);
  return {
    element: made.row(first, badge, rate, share, busy, wait, diagnosis, skew, version, up),
    update(server) {
      const { summary } = server;
      const [text, tone] = stateText(server);
      say(badge, text);
      badge.dataset.tone = tone;
      say(why, reason(server));
      say(rate, number(summary?.batches_per_second ?? null));
      say(share, percent(server.share));
      say(busy, percent(summary?.busy ?? null));
      say(wait, percent(summary?.data_wait ?? null));
      say(diagnosis, summary?.bottleneck ? labelOf(summary.bottleneck).name : UNKNOWN);
      say(skew, server.skew?.work == null ? UNKNOWN : `${number(server.skew.work)} ×`);
      say(version, summary?.version ?? UNKNOWN);
      say(up, duration(summary == null ? null : Math.floor(summary.uptime)));
    },
  };
}

export class ServerList {
  #table = table("Servers, those that need attention first", TITLES);
  #listed = [];
  #instance = null;
  #read = -Infinity;

  constructor() {
    byId("server-list").append(this.#table.element);
  }

  show(stats, consumers) {
    this.#refresh();
    const page = withoutSlash(new URL(".", document.baseURI).href);
    const found = serversOf(page, stateOf(stats), stats.server.ports, this.#listed, this.#instance);
    const servers = compared(found.map((one) => (one.isOwn ? { ...one, summary: ownSummary({ ...stats, consumers }) } : one)));
    byId("servers").hidden = servers.length === 1;
    say(byId("servers-title"), plural(servers.length, "server"));
    list(this.#table.body, servers.slice(0, MAX_SHOWN), ({ url, isOwn }) => `${isOwn} ${url}`, (one) => row(this.#table, one));
    byId("more-servers").hidden = servers.length <= MAX_SHOWN;
    say(byId("more-servers"), `${count(servers.length - MAX_SHOWN)} more servers are not shown.`);
    const best = diagnosing(servers);
    byId("fleet-diagnosis").hidden = best === null;
    if (best !== null) {
      const { bottleneck, confidence, advice } = best.summary;
      say(byId("fleet-diagnosis"), `All servers: ${labelOf(bottleneck).name} (${percent(confidence)} confidence, ${best.url}). ${advice}`);
    }
  }

  // Read the announced servers, and which of them this one is.
  async #refresh() {
    if (Date.now() - this.#read < INTERVAL_MS) return;
    this.#read = Date.now();
    try {
      const { servers, instance } = await fetched("stats/servers");
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
