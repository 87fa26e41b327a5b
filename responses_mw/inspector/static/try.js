// Send the form, and show the events of the answer while they arrive. Without this script, the form shows them at the end.
import { addCopying } from "./copy.js";

const MAX_ROWS = 2000;
const MAX_RAW = 2_000_000;
const form = document.getElementById("try");
const get = (id) => document.getElementById(id);
const stop = get("stop");
const send = form.querySelector("[value=send]");
const rows = get("events").querySelector("tbody");
let abort = null;

function setState(name) {
  const one = document.createElement("span");
  one.className = `status ${name}`;
  one.textContent = name;
  get("state").replaceChildren(one);
}

function showError(text) {
  get("error").textContent = text;
  get("error").hidden = false;
  setState("failed");
}

// What one answer has so far. Events are shown at most once per frame, however fast they arrive.
class Answer {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.events = [];
    this.shown = 0;
    this.text = this.reasoning = this.raw = "";
    this.usage = null;
    this.isDue = false;
    for (const id of ["error", "reasoning", "link", "nothing"]) get(id).hidden = true;
    get("events").hidden = false;
    this.status = 0;
    rows.replaceChildren();
    setState("in_progress");
    this.draw();
  }

  add(event) {
    const after = performance.now() - this.began;
    this.events.push({ event, after });
    if (event.delta && this.first === null) this.first = after;
    if (event.type === "response.output_text.delta" || event.type === "response.refusal.delta") this.text += event.delta;
    if (event.type.startsWith("response.reasoning") && event.type.endsWith(".delta")) this.reasoning += event.delta;
    if (event.response) this.see(event.response);
    if (event.type === "error") showError(event.message ?? event.error?.message ?? "an error");
  }

  see(response) {
    get("link").href = `/ui/responses/${encodeURIComponent(response.id)}`;
    get("link").hidden = false;
    setState(response.status);
    this.usage = response.usage ?? null;
    if (response.error) showError(response.error.message);
  }

  get whole() {
    return performance.now() - this.began;
  }

  schedule() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.isDue = false;
    const fragment = document.createDocumentFragment();
    for (const { event, after } of this.events.slice(Math.max(this.shown, this.events.length - MAX_ROWS))) fragment.append(row(event, after));
    this.shown = this.events.length;
    rows.append(fragment);
    while (rows.rows.length > MAX_ROWS) rows.deleteRow(0);
    rows.closest(".scroll").scrollTop = rows.scrollHeight;
    get("count").textContent = this.events.length;
    rows.closest(".scroll").hidden = this.events.length === 0;
    get("text").textContent = this.text.replace(/^\n+/, "");
    get("raw").textContent = this.raw;
    get("reasoning").hidden = !this.reasoning;
    get("reasoning").querySelector(".text").textContent = this.reasoning;
    const parts = [this.first === null ? "" : `first text after ${time(this.first)}`, `took ${time(this.whole)}`];
    if (this.status) parts.unshift(`HTTP ${this.status}`);
    if (this.usage) parts.push(`${this.usage.input_tokens} tokens in, ${this.usage.output_tokens} out`);
    get("times").textContent = parts.filter(Boolean).join(" · ");
  }
}

const time = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

function row(event, after) {
  const tr = document.createElement("tr");
  const { type, sequence_number: number, ...rest } = event;
  const text = event.delta ?? event.text ?? event.part?.type ?? (event.item ? [event.item.type, event.item.name, event.item.status].filter(Boolean).join(" ") : event.response?.status);
  for (const [name, value] of [["number", number], ["number", time(after)], ["", type], ["wrap", text ?? JSON.stringify(rest)]]) {
    const cell = tr.insertCell();
    cell.className = name;
    if (name === "") cell.append(Object.assign(document.createElement("code"), { textContent: value }));
    else cell.textContent = String(value ?? "").slice(0, 400);
  }
  tr.lastChild.dir = "auto";
  return tr;
}

async function read(body, answer) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    if (answer.raw.length < MAX_RAW) answer.raw += value;
    const frames = (pending + value).split("\n\n");
    pending = frames.pop();
    for (const frame of frames) {
      const data = frame.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") answer.add(JSON.parse(data));
    }
    answer.schedule();
  }
}

async function create(fields) {
  const answer = new Answer();
  abort = new AbortController();
  stop.hidden = false;
  send.disabled = true;
  try {
    const received = await fetch("/ui/try/stream", { method: "POST", body: new URLSearchParams(fields), signal: abort.signal });
    answer.status = received.status;
    if (received.headers.get("content-type")?.startsWith("text/event-stream")) {
      await read(received.body, answer);
    } else if (!received.headers.get("content-type")?.startsWith("application/json")) {
      throw new Error(received.status === 401 ? "Your session has ended. Reload the page to log in." : `HTTP ${received.status}`);
    } else {
      answer.raw = await received.text();
      get("raw").closest("details").open = true;
      const document = JSON.parse(answer.raw);
      if (!received.ok) showError(document.error?.message ?? `status ${received.status}`);
      else answer.see(document);
      const parts = (document.output ?? []).flatMap((item) => item.content ?? []);
      answer.text = parts.map((part) => part.text ?? "").join("");
    }
  } catch (error) {
    if (error.name === "AbortError") setState("interrupted");
    else showError(error.message);
  } finally {
    answer.draw();
    stop.hidden = true;
    send.disabled = false;
  }
}

async function showCode(fields) {
  fields.set("do", "code");
  const page = await fetch("/ui/try", { method: "POST", body: new URLSearchParams(fields) });
  const shown = new DOMParser().parseFromString(await page.text(), "text/html");
  const code = shown.getElementById("code");
  const fault = shown.querySelector("#try .fault");
  if (fault) showError(fault.textContent);
  if (!code) return;
  get("code").replaceWith(code);
  addCopying(code);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const fields = new FormData(form, event.submitter);
  showCode(new FormData(form));
  get("error").hidden = true;
  if (fields.get("do") === "send") create(fields);
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !send.disabled) form.requestSubmit(send);
});
stop.addEventListener("click", () => abort?.abort());
addCopying(document);
