// Highlight the same text on all sides of the translation, follow the events of a running response, and copy code.
import { addCopying } from "./copy.js";

let shown = null;
function highlight(mark) {
  if (mark === shown) return;
  document.querySelectorAll("mark.same").forEach((one) => one.classList.remove("same"));
  if (mark) document.querySelectorAll(`mark[data-mark="${mark}"]`).forEach((one) => one.classList.add("same"));
  shown = mark;
}
document.getElementById("translation")?.addEventListener("mouseover", (event) => {
  highlight(event.target.closest("mark")?.dataset.mark ?? null);
});

const table = document.getElementById("events");
if (table) {
  const body = table.tBodies[0];
  const source = new EventSource(`${table.dataset.url}?after=${table.dataset.after}`);
  let last = Number(table.dataset.after);
  source.onmessage = (message) => {
    const { number, type, text } = JSON.parse(message.data);
    const row = body.insertRow();
    if (number !== last + 1) row.className = "gap";
    last = number;
    const cells = [row.insertCell(), row.insertCell(), row.insertCell()];
    cells[0].className = "number";
    cells[0].textContent = number;
    const code = document.createElement("code");
    code.textContent = type;
    cells[1].append(code);
    cells[2].className = "wrap";
    cells[2].dir = "auto";
    cells[2].textContent = text;
    if (body.rows.length > 2000) body.deleteRow(0);
    row.scrollIntoView({ block: "nearest" });
  };
  source.addEventListener("end", () => {
    source.close();
    setTimeout(() => location.reload(), 500);
  });
}

addCopying(document);
