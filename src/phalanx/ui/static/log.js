// The log of one rank, as it is written: followed, searched, copied.
"use strict";

const LOG_LIMIT = 400000; // characters kept of a log

const log = document.querySelector("[data-log]");
if (log) {
  const follow = document.getElementById("follow");
  const wrap = document.getElementById("wrap");
  const search = document.getElementById("log-search");
  const matches = document.getElementById("log-matches");
  const copy = document.getElementById("log-copy");
  let whole = "";
  const scroll = () => { if (follow.checked) log.scrollTop = log.scrollHeight; };
  const show = () => {
    const words = search.value.toLowerCase();
    const lines = words ? whole.split("\n").filter((line) => line.toLowerCase().includes(words)) : null;
    log.textContent = lines ? lines.join("\n") : whole;
    matches.textContent = lines ? matches.dataset.words.replace("#", lines.length) : "";
    scroll();
  };
  log.textContent = "";
  const stream = new EventSource(log.dataset.log);
  stream.onmessage = (event) => {
    const text = JSON.parse(event.data);
    whole += text;
    if (whole.length > LOG_LIMIT * 1.25) {
      whole = log.dataset.dropped + "\n" + whole.slice(-LOG_LIMIT);
      show();
    } else if (search.value) show();
    else { log.append(text); scroll(); }
  };
  stream.addEventListener("end", () => stream.close());
  search.addEventListener("input", show);
  wrap.addEventListener("change", () => log.classList.toggle("long", !wrap.checked));
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(log.textContent);
    copy.textContent = copy.dataset.done;
  });
  log.addEventListener("wheel", () => { follow.checked = log.scrollTop + log.clientHeight >= log.scrollHeight - 4; });
}
