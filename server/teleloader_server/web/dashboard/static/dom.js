// The few things that this page does with elements. Text is only ever set as text: names and messages come from clients
// and datasets, and are never taken for HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Text that did not change is left alone: it may be selected, or be read out.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A name whose lines break between its parts, if it does not fit into one.
export function sayName(element, name) {
  if (element.textContent === name) return;
  const parts = name.match(/[^/:.]*[/:.]?/g).filter((part) => part !== "");
  element.replaceChildren(...parts.flatMap((part) => [part, make("wbr")]));
}

const kept = new WeakMap();

// Make `parent` show `items` in their order. An item that was there before keeps its elements, and with them the focus
// and what is open: `create(item)` gives {element, update(item)} once, `update` is called each time.
export function list(parent, items, keyOf, create) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, row] of before) if (!now.has(key)) row.element.remove();
  let place = parent.firstElementChild;
  for (const [key, item] of now) {
    const row = before.get(key) ?? create(item);
    row.update(item);
    if (row.element === place) place = place.nextElementSibling;
    else parent.insertBefore(row.element, place);
    now.set(key, row);
  }
  kept.set(parent, now);
}

// A share as a bar. Its role tells whether it is a measure or the progress of something.
export function bar(label, role = "meter") {
  const fill = make("span", { class: "fill" });
  const range = { "aria-valuemin": 0, "aria-valuemax": 100 };
  const element = make("span", { class: "bar", role, "aria-label": label, ...range }, fill);
  return {
    element,
    update(share, text) {
      const part = Math.min(100, Math.max(0, share * 100));
      fill.style.width = `${part}%`;
      element.setAttribute("aria-valuenow", Math.round(part));
      element.setAttribute("aria-valuetext", text);
    },
  };
}

// A table whose rows become cards where it is narrow, for which its cells know their column's title. The roles are
// stated because an element that is displayed otherwise loses its own.
export function table(caption, titles) {
  const head = titles.map((title) => make("th", { scope: "col", role: "columnheader" }, title));
  const body = make("tbody", { role: "rowgroup" });
  const element = make(
    "table",
    { role: "table" },
    make("caption", { class: "unseen" }, caption),
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)),
    body,
  );
  const row = (...contents) => {
    const cells = contents.map((content, i) =>
      i === 0
        ? make("th", { scope: "row", role: "rowheader" }, content)
        : make("td", { role: "cell", "data-title": titles[i] }, content),
    );
    return make("tr", { role: "row" }, ...cells);
  };
  return { element, body, row };
}
