// Requests the status every two seconds while the page is visible. A key stays in this variable only.
import * as sections from "./sections.js";
import { seconds } from "./draw.js";

const STATUS = "fastattention/status";
const SCHEMA_VERSION = 1;
const PERIOD_MS = 2000;
const element = (id) => document.getElementById(id);
let key = "";
let before = null;
let timer = 0;

function say(state, text) {
  element("state").dataset.state = state;
  if (element("state").textContent !== text) element("state").textContent = text;
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const answer = await fetch(STATUS, { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
    if (answer.status === 401) return askForKey();
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const status = await answer.json();
    if (status.schema_version !== SCHEMA_VERSION) throw new Error("this page is from another version of the server; reload it");
    show(status);
  } catch (error) {
    say("lost", error instanceof TypeError ? "No connection to the server" : `No data: ${error.message}`);
  }
  timer = setTimeout(poll, PERIOD_MS);
}

function askForKey() {
  element("key").hidden = false;
  element("sections").hidden = true;
  element("key-note").classList.toggle("bad", key !== "");
  if (key) element("key-note").textContent = "The server does not accept this key. Check it and try again.";
  key = "";
  say("waiting", "API key needed");
  element("key-field").focus();
}

function show(status) {
  const age = status.age_seconds;
  const taken = performance.now() / 1000 - (age ?? 0);
  // While workers are busy with a long step, they report nothing new. A rate needs two different reports.
  const fresh = before !== null && taken - before.taken > 0.5;
  element("key").hidden = true;
  element("sections").hidden = false;
  element("model").textContent = `${status.model} · up to ${status.max_model_len.toLocaleString("en-US")} tokens`;
  element("version").textContent = `fastattention-vllm ${status.version}`;
  document.title = `${status.model} – FastAttention status`;
  for (const name of ["summary", "layers", "pool", "plan", "tiling", "requests"]) sections[name](status);
  if (fresh || before === null) {
    sections.rates(status, before?.status, before ? taken - before.taken : 0);
    before = { status, taken };
  }
  if (status.workers_error) say("lost", `The workers did not report: ${status.workers_error}`);
  else if (age === null) say("waiting", "Workers have not reported yet");
  else if (age > 10) say("waiting", `Workers are busy; the numbers are ${seconds(age)} old`);
  else say("live", "Live");
}

element("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = element("key-field").value;
  element("key-field").value = "";
  poll();
});
document.addEventListener("visibilitychange", poll);
poll();
