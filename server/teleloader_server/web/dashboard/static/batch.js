// Preview of a batch: its tree, with shapes, types and values, and its images.

import { elements, extremes, imagesIn, pixels } from "./arrays.js";
import { byId, make, say } from "./dom.js";
import { readFrame } from "./frame.js";
import { indexFrame } from "./indices.js";
import { bytes, count, indices, number, plural } from "./format.js";

const MAX_BYTES = 64 * 2 ** 20; // larger batches would block the browser
const MAX_ELEMENTS = 2 ** 20; // elements of which minimum and maximum are computed
const MAX_ITEMS = 50;
const MAX_TEXT = 200;
const MAX_IMAGES = 16;
const FIRST = 8;

export class BatchView {
  #form = byId("look");
  #status = byId("looked");
  #content = byId("content");
  #server = null; // the server whose datasets are listed

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      history.replaceState(null, "", location.pathname + location.search);
      this.#look();
    });
  }

  // Request the list of datasets once per server process.
  async show({ server }) {
    const name = `${server.host} ${server.pid}`;
    if (this.#server === name) return;
    this.#server = name;
    try {
      const datasets = await (await ask("v1/datasets")).json();
      const select = this.#form.elements.dataset;
      const chosen = select.value;
      select.replaceChildren(...datasets.map((dataset) => {
        const option = make("option", { value: dataset.name }, dataset.name);
        option.dataset.kind = dataset.kind;
        return option;
      }));
      if (datasets.some((dataset) => dataset.name === chosen)) select.value = chosen;
    } catch {
      this.#server = null; // retry with the next record
    }
  }

  // Show the batch of a preview, which an error or a slow sample comes with.
  open(preview, title) {
    byId("batch").scrollIntoView();
    return this.#look(() => load(preview), title);
  }

  // Show why the batch is not shown.
  refuse(reason) {
    byId("batch").scrollIntoView();
    this.#content.replaceChildren();
    say(this.#status, reason);
  }

  async #look(fetchFrame = () => this.#fetch(), title = "") {
    const button = this.#form.querySelector("button");
    button.disabled = true;
    say(this.#status, `${title}Loading …`);
    this.#content.replaceChildren();
    try {
      this.#show(await fetchFrame(), title);
    } catch (error) {
      say(this.#status, `Request failed: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  }

  async #fetch() {
    const { dataset, batch, size } = this.#form.elements;
    const isIterable = dataset.selectedOptions[0].dataset.kind === "iterable";
    // an iterable-style dataset needs a private worker, which ends after this batch
    const own = isIterable ? { session: `dashboard ${randomNumber()}`, num_workers: 1 } : {};
    const spec = { dataset: dataset.value, batch_size: Number(size.value), checksum: false, ...own };
    const registered = await ask("v1/loaders", { method: "POST", body: JSON.stringify(spec) });
    const { key } = await registered.json();
    try {
      const answer = await ask(`v1/loaders/${key}/epochs/0/batches/${Number(batch.value)}`, {
        headers: { "Teleloader-Consumer": "look" }, // excluded from /stats
      });
      return await body(answer);
    } finally {
      if (isIterable) await fetch(`v1/loaders/${key}`, { method: "DELETE" });
    }
  }

  #show(content, title) {
    const { address, failure, end, tree } = readFrame(content);
    if (failure !== null) {
      say(this.#status, `${title}Batch ${address.batch} failed: ${failure.type}: ${failure.message}`);
      const where = `Its indices: ${indices(failure.indices.slice(0, 20))}.`;
      this.#content.append(make("p", {}, where), make("pre", { tabindex: 0 }, failure.traceback));
    } else if (end !== null) {
      say(this.#status, `${title}No batch ${address.batch}: the dataset yielded ${plural(end.samples, "sample")}.`);
    } else {
      say(this.#status, `${title}Batch ${address.batch}, ${bytes(content.length)}:`);
      this.#content.append(make("ul", { class: "tree" }, item(null, tree)));
    }
  }
}

// Register the loader of a preview, and request its batch. A private loader ends after the request.
async function load({ spec, epoch, batch, indices: listed, is_private }) {
  const own = is_private ? { session: `dashboard ${randomNumber()}` } : {};
  const registered = await ask("v1/loaders", { method: "POST", body: JSON.stringify({ ...spec, ...own, checksum: false, compression: null }) });
  const { key } = await registered.json();
  const headers = { "Teleloader-Consumer": "look" }; // excluded from /stats
  const path = `v1/loaders/${key}/epochs/${epoch}/batches`;
  try {
    if (listed === null) return await body(await ask(`${path}/${batch}`, { headers }));
    const content = indexFrame({ loader: key, epoch, batch }, spec.batch_size === null ? listed[0] : listed);
    return await body(await ask(path, { method: "POST", headers, body: content }));
  } finally {
    if (is_private) await fetch(`v1/loaders/${key}`, { method: "DELETE" });
  }
}

// (crypto.randomUUID is there only for pages that come by https.)
const randomNumber = () => crypto.getRandomValues(new BigUint64Array(2)).join("");

async function ask(path, options) {
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  throw new Error(problem.detail ?? `HTTP status ${answer.status}`);
}

async function body(answer) {
  const size = Number(answer.headers.get("content-length"));
  if (size <= MAX_BYTES) return new Uint8Array(await answer.arrayBuffer());
  await answer.body.cancel();
  throw new Error(`the batch has ${bytes(size)}, and the limit of this page is ${bytes(MAX_BYTES)}: request fewer samples`);
}

// --- The tree

function item(label, node) {
  const element = make("li");
  if (label !== null) element.append(make("span", { class: "key" }, label), " ");
  element.append(...contents(node));
  return element;
}

function contents(node) {
  switch (node.kind) {
    case "value": return [make("code", {}, value(node.value))];
    case "complex": return [make("code", {}, `${node.value[0]} + ${node.value[1]}i`)];
    case "array": return array(node);
    default: return container(node);
  }
}

function container(node) {
  const pairs = node.entries?.map(([key, held]) => [typeof key === "string" ? key : inline(key), held]);
  const held = pairs ?? node.items.map((one, i) => [`${i}`, one]);
  const rows = held.slice(0, MAX_ITEMS).map(([key, one]) => item(key, one));
  if (held.length > MAX_ITEMS) rows.push(make("li", { class: "quiet" }, `and ${count(held.length - MAX_ITEMS)} more`));
  const name = node.name === undefined ? node.kind : `${node.kind} ${node.name}`;
  return [make("span", { class: "quiet" }, `${name} of ${held.length}`), make("ul", {}, ...rows)];
}

// A key of a dict in one line.
function inline(node) {
  if (node.kind === "value") return value(node.value);
  if (node.kind === "array") return value(elements(node, 0, 1)?.[0] ?? null);
  if (node.kind === "complex") return `${node.value[0]} + ${node.value[1]}i`;
  return `${node.kind} (${node.items?.map(inline).join(", ") ?? node.name})`;
}

function value(it) {
  if (it instanceof Uint8Array) {
    const more = it.length > FIRST ? " …" : "";
    return `${plural(it.length, "byte")}: ${Array.from(it.subarray(0, FIRST), hex).join(" ")}${more}`;
  }
  if (typeof it === "string") return JSON.stringify(it.length > MAX_TEXT ? `${it.slice(0, MAX_TEXT)}…` : it);
  return it === null ? "None" : `${it}`;
}

const hex = (byte) => byte.toString(16).padStart(2, "0");

function array(node) {
  const { dtype, shape, as } = node;
  const parts = [
    make("span", { class: "type" }, `${dtype} (${shape.join(", ")}${shape.length === 1 ? "," : ""})`),
    " ",
    make("span", { class: "quiet" }, `${as}, ${bytes(node.bytes.length)}`),
    " ",
    make("code", {}, values(node)),
  ];
  const layout = imagesIn(node);
  if (layout !== null) parts.push(images(node, layout));
  return parts;
}

function values(node) {
  const size = node.shape.reduce((product, length) => product * length, 1);
  const first = elements(node, 0, FIRST);
  if (first === null || size === 0) return "";
  const shown = first.map((one) => (typeof one === "number" && !Number.isInteger(one) ? number(one) : `${one}`));
  const text = `${shown.join(", ")}${size > FIRST ? ", …" : ""}`;
  if (size <= FIRST || size > MAX_ELEMENTS) return text;
  const [least, most] = extremes(elements(node, 0, size));
  const range = [least, most].map((one) => (typeof one === "number" ? number(one) : `${one}`)).join(" to ");
  return `${text}   (${range})`;
}

function images(node, layout) {
  const shown = Math.min(layout.images, MAX_IMAGES);
  const size = `${layout.height} × ${layout.width} pixels`;
  const canvases = Array.from({ length: shown }, (_, n) => {
    const label = `Image ${n + 1} of ${layout.images}, ${size}`;
    const canvas = make("canvas", { role: "img", "aria-label": label, width: layout.width, height: layout.height });
    canvas.getContext("2d").putImageData(pixels(node, layout, n), 0, 0);
    return canvas;
  });
  const scaled = node.dtype === "uint8" ? "" : ", each from its least value (black) to its greatest (white)";
  const all = shown === layout.images;
  const many = all ? plural(shown, "image") : `The first ${shown} of ${count(layout.images)} images`;
  const about = make("figcaption", { class: "quiet" }, `${many} of ${size}${scaled}`);
  return make("figure", { class: "images" }, about, make("div", {}, ...canvases));
}
