// What a page does by itself: it brings its parts up to date while it is seen, and says times in the reader's own zone.
"use strict";

const zone = { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false };
const isUtc = new Date().getTimezoneOffset() === 0;

function tellTimes(within) {
  if (isUtc) return;
  for (const time of within.querySelectorAll("time[datetime]:not([data-told])")) {
    const utc = time.textContent;
    time.textContent = new Date(time.dateTime).toLocaleString("en-GB", zone) + " · " + utc.replace(/^\d+ \w+ /, "");
    time.dataset.told = utc;
  }
}

// Where a table is too wide, its rows are cards: each cell has the name that stands at the head of its column.
function nameCells(within) {
  for (const table of within.querySelectorAll(".scroll table:not(.narrow)")) {
    const heads = [...table.querySelectorAll("thead th")];
    const names = heads.map((head) => (head.querySelector("input, .skip-title") ? "" : head.textContent.replace(/[↑↓]/, "").trim()));
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, at) => {
        if (names[at]) cell.dataset.name = names[at];
        cell.classList.toggle("first", Boolean(names[at]) && !names.slice(0, at).some(Boolean));
        cell.classList.toggle("none", cell.textContent.trim() === "–");
      });
    }
    table.classList.add("cards");
  }
}

// A part that somebody is using stays as it is.
function isInUse(part) {
  const chosen = document.getSelection();
  return part.contains(document.activeElement) || (chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode));
}

function follow(address) {
  const pulse = document.getElementById("pulse"), told = document.getElementById("pulse-text");
  const pause = document.getElementById("pause");
  let stream = null, again = 0, isPaused = false;

  function say(text, isLive) {
    told.textContent = text;
    pulse.hidden = false;
    pulse.classList.toggle("still", !isLive);
  }
  function close(text) {
    if (stream) stream.close();
    stream = null;
    clearTimeout(again);
    say(text, false);
  }
  function open() {
    if (stream || isPaused || document.hidden) return;
    stream = new EventSource(address);
    stream.onopen = () => say("live", true);
    stream.onmessage = (event) => {
      for (const [id, html] of Object.entries(JSON.parse(event.data))) {
        const part = document.getElementById(id);
        if (!part || isInUse(part)) continue;
        part.innerHTML = html; // escaped where it was made: the same templates as the page's
        tellTimes(part);
        nameCells(part);
      }
    };
    stream.onerror = () => {
      say("not connected", false);
      if (stream && stream.readyState === EventSource.CLOSED) {
        close("not connected");
        again = setTimeout(open, 10000);
      }
    };
  }
  // Browsers open six connections to one host: a tab that nobody sees needs none.
  document.addEventListener("visibilitychange", () => (document.hidden ? close("paused") : open()));
  window.addEventListener("pagehide", () => close("paused"));
  window.addEventListener("pageshow", open);
  if (pause) {
    pause.hidden = false;
    pause.addEventListener("click", () => {
      isPaused = !isPaused;
      pause.textContent = isPaused ? "Go on" : "Pause";
      pause.setAttribute("aria-pressed", String(isPaused));
      isPaused ? close("paused") : open();
    });
  }
  open();
}

// A page that waits for something looks again, while somebody sees it.
function lookAgain(seconds) {
  setTimeout(() => (document.hidden ? lookAgain(seconds) : location.reload()), seconds * 1000);
}

tellTimes(document);
nameCells(document);
if (document.body.dataset.again) lookAgain(Number(document.body.dataset.again));
if (document.body.dataset.stream) follow(document.body.dataset.stream);
for (const all of document.querySelectorAll("input[data-all]")) {
  all.closest("td, th").hidden = false;
  all.addEventListener("change", () => {
    for (const one of all.form.querySelectorAll("input[name=id]")) one.checked = all.checked;
  });
}
