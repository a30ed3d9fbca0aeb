// What makes the pages live. Without it they are whole, only still.
"use strict";

const EVERY_MS = 2000;

// Times in the reader's own zone, or as how long ago; the server writes UTC.
const relative = new Intl.RelativeTimeFormat(document.documentElement.lang, { numeric: "auto", style: "short" });
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
const since = (at) => {
  const seconds = (Date.now() - at) / 1000;
  const [unit, size] = UNITS.find(([, length]) => seconds >= length) || UNITS.at(-1);
  return relative.format(-Math.floor(seconds / size), unit);
};
const localise = (within) => {
  for (const item of within.querySelectorAll("time[datetime]")) {
    const at = new Date(item.dateTime);
    const text = new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19).replace("T", " ");
    item.textContent = item.closest("[data-ago]") ? since(at) : text;
    item.title = at.toString();
  }
};
localise(document);

// A form holds what a reader is about to do: a box that is ticked must not be lost.
const isInUse = (part) => part.contains(document.activeElement) || part.querySelector("input:checked") !== null;

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
          if (text !== shown && !isInUse(part)) { part.innerHTML = text; shown = text; localise(part); }
        }
      } catch (error) { console.warn("The server did not answer; asking again.", error); }
    }
    if (!part.querySelector("[data-ended]")) setTimeout(again, EVERY_MS);
  };
  if (!part.querySelector("[data-ended]")) setTimeout(again, EVERY_MS);
}

// Where no rank had written yet: look again when one has.
const waiting = document.querySelector("[data-appears]");
if (waiting) {
  const timer = setInterval(async () => {
    const answer = await fetch(waiting.dataset.appears);
    if (answer.ok && (await answer.json()).length) { clearInterval(timer); location.reload(); }
  }, EVERY_MS);
}

// The form of a job: only the fields that matter, and the YAML that follows them.
const job = document.querySelector("[data-job-form]");
if (job) {
  const yaml = job.elements.yaml;
  let timer, isTyped = false; // a typed YAML fills the form when asked to, and is not overwritten before
  const showFields = () => {
    const backend = job.elements.backend.value || "local";
    for (const part of job.querySelectorAll("[data-backend]")) part.hidden = part.dataset.backend !== backend;
  };
  const follow = async () => {
    const answer = await fetch(job.dataset.jobForm, { method: "POST", body: new FormData(job) });
    if (answer.ok) yaml.value = await answer.text();
  };
  job.addEventListener("input", (event) => {
    clearTimeout(timer);
    if (event.target === yaml) { isTyped = true; return; }
    showFields();
    if (isTyped) return;
    timer = setTimeout(() => follow().catch((error) => console.warn("The YAML does not follow.", error)), 300);
  });
  job.elements.backend.addEventListener("change", showFields);
  showFields();
  document.getElementById("problem")?.focus();
  job.addEventListener("submit", (event) => {
    if (isTyped && event.submitter?.value !== "fill" && !confirm(job.dataset.typed)) event.preventDefault();
  });
}

document.addEventListener("change", (event) => {
  const form = event.target.form, all = form?.querySelector("[data-select-all]");
  if (!all) return;
  const boxes = [...form.querySelectorAll("input[name=job]")];
  if (event.target === all) for (const box of boxes) box.checked = all.checked;
  else all.checked = boxes.every((box) => box.checked);
});
document.addEventListener("change", (event) => { if (event.target.matches("[data-submit]")) event.target.form.requestSubmit(); });
document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.question || event.target.dataset.question;
  if (question && !confirm(question)) event.preventDefault();
});
