// Starts the page: which view is seen, the API key, and waiting for the model.

import { KEY_REFUSED, key, request } from "./api.js";
import { setModels, startChat } from "./chat.js";
import { find } from "./dom.js";
import { startEngine, watch } from "./engine.js";

const VIEWS = ["chat", "engine"];
const RETRY = 1000; // milliseconds

function showView() {
  const wanted = VIEWS.find((view) => location.hash === `#${view}`) ?? VIEWS[0];
  for (const view of VIEWS) {
    find(view).hidden = view !== wanted;
    const link = document.querySelector(`nav a[href="#${view}"]`);
    link.ariaCurrent = view === wanted ? "page" : null;
  }
}

function setStatus(text, state) {
  find("status").textContent = text;
  find("status").dataset.state = state;
}

/** Until the models are known. A refused key ends it: the form begins it again. */
async function connect() {
  try {
    const { data } = await (await request("v1/models")).json();
    setModels(data);
    setStatus("ready", "ready");
    watch();
  } catch (error) {
    if (error.status === 401) return;
    setStatus(error.status === 503 ? await stage() : error.message, "waiting");
    setTimeout(connect, RETRY);
  }
}

/** What a server does that is not ready. */
async function stage() {
  try {
    const { status, stage, progress, reason } = await (await fetch("health", { cache: "no-store" })).json();
    return reason ?? (status === "starting" ? `${stage} ${Math.round(100 * progress)} %` : status);
  } catch {
    return "The server does not answer.";
  }
}

function askForKey() {
  key.forget();
  find("forget").hidden = true;
  find("key-form").hidden = false;
  find("key").focus();
  setStatus("needs an API key", "waiting");
}

function takeKey(event) {
  event.preventDefault();
  key.set(find("key").value);
  find("key").value = "";
  find("key").blur(); // a hidden field keeps the focus until the next frame, and Enter would send it empty
  find("key-form").hidden = true;
  find("forget").hidden = false;
  connect();
}

window.addEventListener("hashchange", showView);
window.addEventListener(KEY_REFUSED, askForKey);
find("key-form").addEventListener("submit", takeKey);
find("forget").addEventListener("click", askForKey);
find("forget").hidden = !key.get();
showView();
startChat();
startEngine(connect);
connect();
