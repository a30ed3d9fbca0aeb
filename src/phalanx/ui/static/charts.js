// Charts: what ranks report, what nodes use, and runs side by side.
"use strict";

const MOST_CHARTS = 20; // beside loss and speed
// Of a report, what has a chart of its own, is an axis or only counts up; the table of last reports has it.
const COUNTS = new Set(["time", "step", "loss", "samples_per_s", "pace", "epoch", "epochs", "total_steps", "samples", "train_s", "compile_s"]);
const HEIGHT = 240;
const COLOURS = ["#2f7dc9", "#d9822b", "#2e9e62", "#b04bb5", "#c43d3d", "#7a8a99", "#8d6b1f", "#158f96"];
const CLOCK = (time) => (time == null ? "" : new Date(time * 1000).toTimeString().slice(0, 8));
const NUMBER = (value) => value.toLocaleString(undefined, Math.abs(value) < 1 ? { maximumSignificantDigits: 4 } : {});

// How charts are drawn now, by the controls of the page; whoever draws is told of changes.
const chartOptions = { smoothing: 0, log: false, time: false, filter: "" };
const redraws = [];
document.querySelector("[data-chart-controls]")?.addEventListener("input", (event) => {
  const control = event.target;
  const values = { checkbox: control.checked, search: control.value.trim().toLowerCase() };
  chartOptions[control.name] = values[control.type] ?? Number(control.value);
  for (const redraw of redraws) redraw();
});

// The exponential average of [[x, y], ...], without the weight of its start (Kingma & Ba 2015, section 3).
const smooth = (points) => {
  const weight = chartOptions.smoothing;
  if (!weight) return points;
  let sum = 0, count = 0;
  return points.map(([x, y]) => {
    if (typeof y !== "number") return [x, null];
    sum = weight * sum + (1 - weight) * y;
    count += 1;
    return [x, sum / (1 - weight ** count)];
  });
};

// What the legend shows of a line: its value at the pointer or, where there is no pointer, its last.
const legendValue = (format) => (plot, value, line, place) => {
  const shown = place == null ? plot.data[line].findLast((known) => known !== null) : value;
  return shown == null ? "--" : format(shown);
};

// Charts in `box`: draw(key, title, lines, axis), lines a map of names to [[x, y], ...]; draw.showOnly(keys) hides the others.
const plotter = (box, { isSmoothed = true, scales = {} } = {}) => {
  const drawn = {};
  const width = () => Math.max(280, parseFloat(getComputedStyle(box).gridTemplateColumns.split(" ")[0]) || 300);
  new ResizeObserver(() => { for (const { plot } of Object.values(drawn)) plot.setSize({ width: width(), height: HEIGHT }); }).observe(box);
  const cursor = { sync: { key: box.className + (box.dataset.usage || "reports") } };
  const table = (lines) => {
    const places = [...new Set([...lines.values()].flatMap((points) => points.map((point) => point[0])))].sort((a, b) => a - b);
    const at = new Map(places.map((place, index) => [place, index]));
    const columns = [...lines.values()].map((points) => {
      const values = new Array(places.length).fill(null);
      for (const [place, value] of isSmoothed ? smooth(points) : points) {
        if (typeof value === "number" && !(chartOptions.log && isSmoothed && value <= 0)) values[at.get(place)] = value;
      }
      return values;
    });
    return [places, ...columns];
  };
  const draw = (key, title, lines, axis) => {
    const data = table(lines);
    if (!data.slice(1).some((values) => values.some((value) => value !== null))) {
      if (drawn[key]) { drawn[key].plot.destroy(); drawn[key].figure.remove(); delete drawn[key]; }
      return;
    }
    const isLog = chartOptions.log && isSmoothed;
    const shape = [axis.label, isLog, ...lines.keys()].join();
    if (drawn[key]?.shape === shape) {
      drawn[key].plot.setData(data);
      drawn[key].plot.setLegend(); // or it shows the last values of before
      return;
    }
    const figure = drawn[key]?.figure || document.createElement("figure");
    if (drawn[key]) drawn[key].plot.destroy();
    else {
      box.querySelector(".empty")?.remove();
      const caption = document.createElement("figcaption");
      caption.textContent = title;
      figure.append(caption);
      box.append(figure);
    }
    const series = [{ label: axis.label, value: legendValue(axis.value || NUMBER) }, ...[...lines.keys()].map((name, index) => ({
      label: name, stroke: COLOURS[index % COLOURS.length], width: 2, spanGaps: true, value: legendValue(NUMBER) }))];
    const look = { stroke: getComputedStyle(document.body).color, grid: { stroke: "#8884" } };
    const axes = [{ ...look, values: axis.values }, { ...look, size: 64 }];
    const y = isLog ? { distr: 3 } : (scales.y || {});
    const plot = new uPlot({ width: width(), height: HEIGHT, cursor, scales: { x: { time: false }, y }, series, axes }, data, figure);
    drawn[key] = { plot, figure, shape };
  };
  draw.showOnly = (keys) => { for (const [key, { figure }] of Object.entries(drawn)) figure.hidden = !keys.has(key); };
  return draw;
};

// Ask `address` for what lies behind `offsets()`, until nothing more comes; `take` gets every answer.
const pursue = (address, everyMs, offsets, take) => {
  const ask = async () => {
    let ended = false;
    try {
      const answer = await fetch(`${address}&offsets=${encodeURIComponent(offsets())}`);
      if (answer.ok) {
        const more = await answer.json();
        ended = more.ended;
        take(more);
      }
    } catch (error) { console.warn("No figures came; asking again.", error); }
    if (!ended) setTimeout(ask, everyMs);
  };
  ask();
};

const offsetsOf = (known) => [...known].map(([name, line]) => `${name}:${line.offset}`).join(",");

// Add the events of a rank to a line, each with its pace in steps/s.
const extend = (line, events) => {
  for (const event of events) {
    const last = line.points.at(-1);
    const pace = last && event.step > last.step && event.time > last.time ? (event.step - last.step) / (event.time - last.time) : null;
    line.points.push({ ...event, pace });
  }
};

// Draw loss, speed and, with `all`, every other number that lines report.
const reportCharts = (box, lines, all) => {
  const draw = plotter(box);
  const redraw = () => {
    const axis = chartOptions.time
      ? { label: box.dataset.time, value: (seconds) => `${Math.round(seconds)} s` }
      : { label: box.dataset.step };
    const place = (line, event) => (chartOptions.time ? event.time - line.points[0].time : event.step);
    const of = (value) => new Map([...lines].map(([, line]) => [line.label, line.points.map((event) => [place(line, event), value(event)])]));
    const shown = new Set();
    const isAskedFor = (title) => title.toLowerCase().includes(chartOptions.filter);
    const show = (key, title, value) => {
      if (!isAskedFor(title)) return;
      shown.add(key);
      draw(key, title, of(value), axis);
    };
    show("loss", box.dataset.loss, (event) => event.loss);
    const events = [...lines.values()].flatMap((line) => line.points);
    if (events.some((event) => typeof event.samples_per_s === "number")) show("speed", box.dataset.speed, (event) => event.samples_per_s);
    else show("pace", box.dataset.pace, (event) => event.pace);
    if (!all) return;
    // What else the script reports; a value that is no number is in the table of last reports.
    const names = new Set(events.flatMap((event) => Object.keys(event).filter((name) => typeof event[name] === "number" && !COUNTS.has(name))));
    for (const name of [...names].filter(isAskedFor).slice(0, MOST_CHARTS)) show(`reported ${name}`, name, (event) => event[name]);
    draw.showOnly(shown);
  };
  redraws.push(redraw);
  return redraw;
};

// What every rank of a job reports.
const charts = document.querySelector("[data-reports]");
if (charts) {
  const ranks = new Map(); // rank -> {label, offset, points: [event]}
  const redraw = reportCharts(charts, ranks, charts.dataset.metrics === "all");
  pursue(charts.dataset.reports, EVERY_MS, () => offsetsOf(ranks), (more) => {
    for (const part of more.ranks) {
      const line = ranks.get(part.rank) || { label: part.rank, points: [] };
      line.offset = part.offset;
      extend(line, part.events);
      ranks.set(part.rank, line);
    }
    redraw();
  });
}

// The first rank of several jobs.
const compared = document.querySelector("[data-compare]");
if (compared) {
  const jobs = new Map();
  const redraw = reportCharts(compared, jobs, true);
  for (const [name, address] of Object.entries(JSON.parse(compared.dataset.compare))) {
    const ranks = new Map(), line = { label: name, points: [] };
    jobs.set(name, line); // in the order of the table, whoever answers first
    pursue(address, EVERY_MS, () => offsetsOf(ranks), (more) => {
      for (const part of more.ranks) ranks.set(part.rank, { offset: part.offset });
      const first = more.ranks[0];
      if (!first) return;
      extend(line, first.events);
      redraw();
    });
  }
}

// What every node uses, over time.
const used = document.querySelector("[data-usage]");
if (used) {
  const nodes = new Map(); // node -> {label, offset, points: [sample]}
  const draw = plotter(used, { isSmoothed: false, scales: { y: { range: (_, least, most) => [0, Math.max(most * 1.1, 0.1)] } } });
  const axis = { label: used.dataset.time, value: CLOCK, values: (_, times) => times.map(CLOCK) };
  const over = (key, value) => draw(key, used.dataset[key],
    new Map([...nodes].map(([, line]) => [line.label, line.points.map((sample) => [sample.time, value(sample)])])), axis);
  const gib = (bytes) => (bytes === null ? null : bytes / 2 ** 30);
  pursue(used.dataset.usage, 2.5 * EVERY_MS, () => offsetsOf(nodes), (more) => {
    for (const part of more.nodes) {
      const line = nodes.get(part.node) || { label: `${used.dataset.node} ${part.node}`, points: [] };
      line.offset = part.offset;
      line.points.push(...part.samples);
      nodes.set(part.node, line);
    }
    over("cpu", (sample) => sample.cpu);
    over("memory", (sample) => gib(sample.memory));
    over("gpu", (sample) => sample.gpu);
    over("gpuMemory", (sample) => gib(sample.gpu_memory));
  });
}
