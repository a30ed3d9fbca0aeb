// What makes the pages live. Without it they are whole, only still.
"use strict";

const EVERY_MS = 2000;
const MOST_CHARTS = 20; // beside loss and speed
// Of a report, what has a chart of its own, is an axis or only counts up; the table of last reports has it.
const COUNTS = new Set(["time", "step", "loss", "samples_per_s", "pace", "epoch", "samples", "train_s", "compile_s"]);
const LOG_LIMIT = 400000; // characters kept of a log

// Times in the reader's own zone; the server writes UTC.
const localise = (within) => {
  for (const one of within.querySelectorAll("time[datetime]")) {
    const at = new Date(one.dateTime);
    one.textContent = new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19).replace("T", " ");
    one.title = at.toString();
  }
};
localise(document);

// Parts of a page that the server makes anew.
for (const part of document.querySelectorAll("[data-live]")) {
  let shown = part.innerHTML;
  const again = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(part.dataset.live, { headers: { Accept: "text/html", Live: "1" } });
        if (answer.status === 401) { location.reload(); return; }
        if (answer.ok) {
          const text = await answer.text();
          // A focused link or an open selection would be lost under the reader's hands.
          if (text !== shown && !part.contains(document.activeElement)) { part.innerHTML = text; shown = text; localise(part); }
        }
      } catch (error) { console.warn("The server did not answer; asking again.", error); }
    }
    if (!part.querySelector("[data-ended]")) setTimeout(again, EVERY_MS);
  };
  if (!part.querySelector("[data-ended]")) setTimeout(again, EVERY_MS);
}

// The log of one rank, as it is written.
const log = document.querySelector("[data-log]");
if (log) {
  const follow = document.getElementById("follow");
  log.textContent = "";
  const end = () => { if (follow.checked) log.scrollTop = log.scrollHeight; };
  const stream = new EventSource(log.dataset.log);
  stream.onmessage = (event) => {
    log.append(JSON.parse(event.data));
    if (log.textContent.length > LOG_LIMIT * 1.25) {
      log.textContent = log.dataset.dropped + "\n" + log.textContent.slice(-LOG_LIMIT);
    }
    end();
  };
  stream.addEventListener("end", () => stream.close());
  log.addEventListener("wheel", () => { follow.checked = log.scrollTop + log.clientHeight >= log.scrollHeight - 4; });
}

// Where no rank had written yet: look again when one has.
const waiting = document.querySelector("[data-appears]");
if (waiting) {
  const timer = setInterval(async () => {
    const answer = await fetch(waiting.dataset.appears);
    if (answer.ok && (await answer.json()).length) { clearInterval(timer); location.reload(); }
  }, EVERY_MS);
}

// Charts in `box` with `x` as their axis: draw(key, title, lines), lines a map of names to [[x, y], ...].
const plotter = (box, x) => {
  const drawn = {};
  const colours = ["#2f7dc9", "#d9822b", "#2e9e62", "#b04bb5", "#c43d3d", "#7a8a99", "#8d6b1f", "#158f96"];
  const table = (lines) => {
    const places = [...new Set([...lines.values()].flatMap((points) => points.map((one) => one[0])))].sort((a, b) => a - b);
    const at = new Map(places.map((place, index) => [place, index]));
    const columns = [...lines.values()].map((points) => {
      const values = new Array(places.length).fill(null);
      for (const [place, value] of points) if (typeof value === "number") values[at.get(place)] = value;
      return values;
    });
    return [places, ...columns];
  };
  return (key, title, lines) => {
    const data = table(lines);
    if (!data.slice(1).some((values) => values.some((one) => one !== null))) return;
    const names = [...lines.keys()].join();
    if (drawn[key] && drawn[key].names === names) { drawn[key].plot.setData(data); return; }
    if (drawn[key]) drawn[key].figure.remove();
    box.querySelector(".empty")?.remove();
    const width = Math.max(300, Math.min(560, box.clientWidth / 2 - 12));
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    box.append(figure);
    const series = [{ label: x.label, value: x.value }, ...[...lines.keys()].map((name, index) => ({
      label: name, stroke: colours[index % colours.length], width: 2, spanGaps: true }))];
    const text = getComputedStyle(document.body).color;
    const axis = { stroke: text, grid: { stroke: "#8884" } };
    const axes = [{ ...axis, values: x.values }, { ...axis, size: 64 }];
    const plot = new uPlot({ width, height: 240, scales: { x: { time: false }, ...x.scales }, series, axes }, data, figure);
    drawn[key] = { plot, figure, names };
  };
};

// Ask `address` for what lies behind `offsets()`, until nothing more comes; `take` gets every answer.
const pursue = (address, everyMs, offsets, take) => {
  const ask = async () => {
    let ended = false;
    try {
      const answer = await fetch(`${address}&offsets=${encodeURIComponent(offsets())}`);
      if (answer.ok) {
        const found = await answer.json();
        ended = found.ended;
        take(found);
      }
    } catch (error) { console.warn("No figures came; asking again.", error); }
    if (!ended) setTimeout(ask, everyMs);
  };
  ask();
};

const offsetsOf = (known) => [...known].map(([name, one]) => `${name}:${one.offset}`).join(",");
const linesOf = (known, place, value) => new Map([...known].map(([, one]) => [one.label, one.points.map((point) => [place(point), value(point)])]));

// Loss and speed of every rank over steps.
const charts = document.querySelector("[data-reports]");
if (charts) {
  const ranks = new Map(); // rank -> {label, offset, points: [event with its pace in steps/s]}
  const draw = plotter(charts, { label: charts.dataset.step });
  const over = (key, value) => draw(key, charts.dataset[key], linesOf(ranks, (event) => event.step, value));
  pursue(charts.dataset.reports, EVERY_MS, () => offsetsOf(ranks), (found) => {
    for (const one of found.ranks) {
      const known = ranks.get(one.rank) || { label: one.rank, points: [] };
      known.offset = one.offset;
      for (const event of one.events) {
        const last = known.points.at(-1);
        const pace = last && event.step > last.step && event.time > last.time ? (event.step - last.step) / (event.time - last.time) : null;
        known.points.push({ ...event, pace });
      }
      ranks.set(one.rank, known);
    }
    over("loss", (event) => event.loss);
    const events = [...ranks.values()].flatMap((one) => one.points);
    if (events.some((event) => typeof event.samples_per_s === "number")) over("speed", (event) => event.samples_per_s);
    else over("pace", (event) => event.pace);
    // What else the script reports; a value that is no number is in the table of last reports.
    const names = new Set(events.flatMap((event) => Object.keys(event).filter((name) => typeof event[name] === "number" && !COUNTS.has(name))));
    for (const name of [...names].slice(0, MOST_CHARTS)) draw(`reported ${name}`, name, linesOf(ranks, (event) => event.step, (event) => event[name]));
  });
}

// What every node uses, over time.
const used = document.querySelector("[data-usage]");
if (used) {
  const nodes = new Map(); // node -> {label, offset, points: [sample]}
  const clock = (time) => (time == null ? "--" : new Date(time * 1000).toTimeString().slice(0, 8));
  const fromZero = { y: { range: (_, least, most) => [0, Math.max(most * 1.1, 0.1)] } };
  const draw = plotter(used, {
    label: used.dataset.time, scales: fromZero, value: (_, time) => clock(time), values: (_, times) => times.map(clock) });
  const over = (key, value) => draw(key, used.dataset[key], linesOf(nodes, (sample) => sample.time, value));
  const gib = (bytes) => (bytes === null ? null : bytes / 2 ** 30);
  pursue(used.dataset.usage, 2.5 * EVERY_MS, () => offsetsOf(nodes), (found) => {
    for (const one of found.nodes) {
      const known = nodes.get(one.node) || { label: `${used.dataset.node} ${one.node}`, points: [] };
      known.offset = one.offset;
      known.points.push(...one.samples);
      nodes.set(one.node, known);
    }
    over("cpu", (sample) => sample.cpu);
    over("memory", (sample) => gib(sample.memory));
    over("gpu", (sample) => sample.gpu);
    over("gpuMemory", (sample) => gib(sample.gpu_memory));
  });
}

document.addEventListener("change", (event) => { if (event.target.matches("[data-submit]")) event.target.form.requestSubmit(); });
document.addEventListener("submit", (event) => {
  const question = event.target.dataset.question;
  if (question && !confirm(question)) event.preventDefault();
});
