// Brings the page up to date: asks for it again, and changes only what differs, so that focus, scrolling and what is
// typed stay. Without it the browser reloads the page instead.
"use strict";

const EVERY_MS = 2000;
const TIMEOUT_MS = 5000;

const stale = document.getElementById("stale");
let answered = new Date();

/** Make `from` equal to `to`. Elements with a data-key are the same when their keys are. */
function morph(from, to) {
  if (from.nodeType === Node.TEXT_NODE) {
    if (from.data !== to.data) from.data = to.data;
    return;
  }
  if (from.isEqualNode(to) || from.matches("[data-hold]:is(:hover, :focus-within)")) return;
  for (const { name } of [...from.attributes]) if (!to.hasAttribute(name)) from.removeAttribute(name);
  for (const { name, value } of to.attributes) if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  const wanted = new Set([...to.children].map(keyOf).filter(Boolean));
  const known = new Map();
  for (const child of [...from.children]) {
    const key = keyOf(child);
    if (key && !wanted.has(key)) child.remove();
    else if (key) known.set(key, child);
  }
  let at = from.firstChild;
  for (const child of [...to.childNodes]) {
    const key = keyOf(child);
    const match = key ? known.get(key) : alike(at, child) ? at : null;
    if (!match) {
      from.insertBefore(document.importNode(child, true), at);
    } else {
      if (match === at) at = at.nextSibling;
      else from.insertBefore(match, at);
      morph(match, child);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function keyOf(node) {
  return node.dataset ? node.dataset.key : undefined;
}

function alike(one, other) {
  return one && !keyOf(one) && one.nodeName === other.nodeName;
}

/** Who goes by keyboard must not be thrown back to the page's beginning because what had the focus was made anew. */
function refocus(lost) {
  const same = (link) => lost.href && link.href === lost.href;
  const found = lost.isConnected ? lost : [...document.querySelectorAll("#live a")].find(same);
  (found || document.getElementById("main")).focus({ preventScroll: true });
}

function say(text) {
  stale.textContent = text;
  stale.hidden = !text;
}

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      const live = next.getElementById("live");
      if (!live) throw new Error("not our page");
      const focused = document.activeElement;
      morph(document.getElementById("live"), live);
      if (focused !== document.activeElement) refocus(focused);
      document.title = next.title;
      answered = new Date();
      say("");
    } catch {
      const time = answered.toISOString().slice(11, 19);
      say(`The router does not answer: this is what it said at ${time} UTC.`);
    }
  }
  setTimeout(refresh, EVERY_MS);
}

if (!document.body.hasAttribute("data-paused")) setTimeout(refresh, EVERY_MS);
