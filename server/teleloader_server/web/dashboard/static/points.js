// Points, events and diagnoses of the last hour, over restarts of the server. No elements.

const MAX_SECONDS = 3600;

const empty = () => ({ times: [], columns: {}, marks: [], labels: [] });

// Add an array of numbers to a column, which was missing before if `length` points have no value.
function extend(column, values, length) {
  while (column.length < length) column.push(null);
  for (const value of values) column.push(value);
}

function joined(one, other) {
  const columns = {};
  for (const name of new Set([...Object.keys(one.columns), ...Object.keys(other.columns)])) {
    columns[name] = {};
    for (const kind of ["mean", "min", "max"]) {
      const column = (columns[name][kind] = [...(one.columns[name]?.[kind] ?? [])]);
      extend(column, other.columns[name]?.[kind] ?? [], one.times.length);
      extend(column, [], one.times.length + other.times.length);
    }
  }
  return {
    times: [...one.times, ...other.times],
    columns,
    marks: [...one.marks, ...other.marks],
    labels: [...one.labels, ...other.labels],
  };
}

export class Points {
  #pid = null;
  #origin = 0; // time of second 0 of the current process
  #earlier = empty(); // of the processes before it
  #current = empty();
  #next = null; // second of the next point
  #latest = 0; // second of the server's clock in the latest response, of which earlier points may be shown

  // Process ID of the current process; null before the first response.
  get pid() {
    return this.#pid;
  }

  // Second from which on the next points are missing; null before the first response.
  get next() {
    return this.#next;
  }

  // Time of the latest point's end, in Unix seconds of the server's clock.
  get now() {
    return this.#next === null ? null : this.#origin + this.#next;
  }

  // Time of the latest response, in Unix seconds of the server's clock; null before the first one.
  get latest() {
    return this.#next === null ? null : this.#origin + this.#latest;
  }

  // Time of the first point; null without points.
  get first() {
    return this.#earlier.times[0] ?? this.#current.times[0] ?? null;
  }

  // Convert a time to a second of the current process.
  secondOf(time) {
    return Math.max(0, Math.floor(time - this.#origin));
  }

  // Replace the points of the current process by those of a response.
  load(response) {
    this.#meet(response);
    this.#current = empty();
    this.#take(response);
  }

  // Add points that follow the latest one; return false if they do not, because another process responded.
  append(response) {
    if (response.pid !== this.#pid || response.since < this.#next) return false;
    this.#take(response);
    this.#drop(this.#current, this.now - MAX_SECONDS);
    return true;
  }

  // Forget all points, for those of another dataset or consumer.
  clear() {
    this.#earlier = this.#current = empty();
    this.#next = null;
    this.#pid = null;
  }

  // Points, events and diagnoses between two times. Lines have gaps where points have no value.
  between(low, high) {
    const all = this.#earlier.times.length === 0 ? this.#current : joined(this.#earlier, this.#current);
    const start = all.times.findIndex((time) => time >= low);
    const after = all.times.findLastIndex((time) => time <= high) + 1;
    const cut = (values) => (start < 0 ? [] : values.slice(start, Math.max(start, after)));
    const columns = Object.entries(all.columns).map(([name, kinds]) => [
      name,
      Object.fromEntries(Object.entries(kinds).map(([kind, values]) => [kind, cut(values)])),
    ]);
    const inside = ({ at }) => at >= low && at <= high;
    const labels = all.labels.map((label, i) => ({ ...label, until: all.labels[i + 1]?.at ?? this.now }));
    return {
      times: cut(all.times),
      columns: Object.fromEntries(columns),
      marks: all.marks.filter(inside),
      labels: labels.filter(({ at, until }) => until > low && at < high),
    };
  }

  #meet({ pid, started }) {
    if (pid === this.#pid) return;
    if (this.#pid !== null && this.#current.times.length > 0) {
      this.#earlier = joined(this.#earlier, this.#current);
      const end = this.now;
      // a point without values: no line across the restart
      for (const kinds of Object.values(this.#earlier.columns)) for (const values of Object.values(kinds)) values.push(null);
      this.#earlier.times.push(end);
      this.#earlier.labels.push({ at: end, bottleneck: null });
      started = Math.max(started, end + 1); // the machine's clock may have been set back
      this.#drop(this.#earlier, started - MAX_SECONDS);
    }
    this.#pid = pid;
    this.#origin = started;
    this.#current = empty();
  }

  #take({ now, since, step, series, marks, diagnoses }) {
    const current = this.#current;
    const before = current.times.length;
    const points = Object.values(series)[0].mean.length;
    for (let i = 0; i < points; i += 1) current.times.push(this.#origin + since + i * step);
    for (const [name, { mean, min, max }] of Object.entries(series)) {
      const column = (current.columns[name] ??= { mean: [], min: [], max: [] });
      extend(column.mean, mean, before);
      extend(column.min, min ?? mean, before);
      extend(column.max, max ?? mean, before);
    }
    const seen = new Set(current.marks.map(({ at, kind, text }) => `${at} ${kind} ${text}`));
    for (const { second, kind, text } of marks) {
      const mark = { at: this.#origin + second, kind, text };
      if (!seen.has(`${mark.at} ${kind} ${text}`)) current.marks.push(mark);
    }
    for (const { second, bottleneck } of diagnoses) {
      const last = current.labels.at(-1);
      if (last === undefined || last.bottleneck !== bottleneck) {
        current.labels.push({ at: this.#origin + second, bottleneck });
      }
    }
    this.#next = Math.min(since + points * step, now); // the last point may have fewer seconds
    this.#latest = now;
  }

  #drop(part, oldest) {
    const old = part.times.findIndex((time) => time >= oldest);
    const count = old < 0 ? part.times.length : old;
    if (count === 0) return;
    part.times.splice(0, count);
    for (const kinds of Object.values(part.columns)) for (const values of Object.values(kinds)) values.splice(0, count);
    part.marks = part.marks.filter(({ at }) => at >= oldest);
    const first = part.labels.findLastIndex(({ at }) => at <= oldest);
    if (first > 0) part.labels.splice(0, first);
  }
}
