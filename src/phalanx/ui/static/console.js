// What makes the pages live. Without it they are whole, only still.
"use strict";

const EVERY_MS = 2000;
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

// Loss and speed of every rank over steps.
const charts = document.querySelector("[data-reports]");
if (charts) {
  const ranks = new Map(); // rank -> {offset, points: [[step, loss, samples/s, time, steps/s]]}
  const drawn = {};
  const colours = ["#2f7dc9", "#d9822b", "#2e9e62", "#b04bb5", "#c43d3d", "#7a8a99", "#8d6b1f", "#158f96"];
  const table = (column) => {
    const named = [...ranks.keys()];
    const steps = [...new Set(named.flatMap((name) => ranks.get(name).points.map((one) => one[0])))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, index) => [step, index]));
    const columns = named.map((name) => {
      const values = new Array(steps.length).fill(null);
      for (const one of ranks.get(name).points) if (typeof one[column] === "number") values[at.get(one[0])] = one[column];
      return values;
    });
    return [steps, ...columns];
  };
  const draw = (key, title, column) => {
    const data = table(column);
    if (!data.slice(1).some((values) => values.some((one) => one !== null))) return;
    const width = Math.max(300, Math.min(560, charts.clientWidth / 2 - 12));
    if (drawn[key] && drawn[key].names === [...ranks.keys()].join()) { drawn[key].plot.setData(data); return; }
    if (drawn[key]) drawn[key].figure.remove();
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    charts.append(figure);
    const series = [{ label: charts.dataset.step }, ...[...ranks.keys()].map((name, index) => ({
      label: name, stroke: colours[index % colours.length], width: 2, spanGaps: true }))];
    const text = getComputedStyle(document.body).color;
    const axes = [{ stroke: text, grid: { stroke: "#8884" } }, { stroke: text, grid: { stroke: "#8884" }, size: 64 }];
    const plot = new uPlot({ width, height: 240, scales: { x: { time: false } }, series, axes }, data, figure);
    drawn[key] = { plot, figure, names: [...ranks.keys()].join() };
  };
  const ask = async () => {
    let ended = false;
    try {
      const offsets = [...ranks].map(([name, one]) => `${name}:${one.offset}`).join(",");
      const answer = await fetch(`${charts.dataset.reports}&offsets=${encodeURIComponent(offsets)}`);
      if (answer.ok) {
        const found = await answer.json();
        ended = found.ended;
        for (const one of found.ranks) {
          const known = ranks.get(one.rank) || { offset: 0, points: [] };
          known.offset = one.offset;
          for (const event of one.events) {
            const last = known.points.at(-1);
            const pace = last && event.step > last[0] && event.time > last[3] ? (event.step - last[0]) / (event.time - last[3]) : null;
            known.points.push([event.step, event.loss, event.samples_per_s, event.time, pace]);
          }
          ranks.set(one.rank, known);
        }
        if (ranks.size) {
          const empty = charts.querySelector(".empty");
          if (empty && [...ranks.values()].some((one) => one.points.length)) empty.remove();
          draw("loss", charts.dataset.loss, 1);
          const told = [...ranks.values()].some((one) => one.points.some((point) => typeof point[2] === "number"));
          if (told) draw("speed", charts.dataset.speed, 2);
          else draw("pace", charts.dataset.pace, 4);
        }
      }
    } catch (error) { console.warn("No reports came; asking again.", error); }
    if (!ended) setTimeout(ask, EVERY_MS);
  };
  ask();
}

document.addEventListener("change", (event) => { if (event.target.matches("[data-submit]")) event.target.form.requestSubmit(); });
document.addEventListener("submit", (event) => {
  const question = event.target.dataset.question;
  if (question && !confirm(question)) event.preventDefault();
});
