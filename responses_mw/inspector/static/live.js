// Show responses as they end: fetch the same list again when the server reports new ones. A pause keeps the rows in place.
const live = document.getElementById("live");
if (live) {
  const button = live.querySelector("button");
  const status = live.querySelector("[role=status]");
  let waiting = 0;
  let source = null;

  const isOn = () => button.getAttribute("aria-pressed") === "true";

  async function refresh() {
    waiting = 0;
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("#responses tbody").replaceWith(page.querySelector("#responses tbody"));
    document.querySelector(".paging").replaceWith(page.querySelector(".paging"));
    status.textContent = "";
  }

  function follow() {
    source = new EventSource(live.dataset.url);
    source.onmessage = (message) => {
      waiting += Number(message.data);
      if (isOn()) refresh();
      else status.textContent = `${waiting} new`;
    };
  }

  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(!isOn()));
    if (isOn()) refresh();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) {
      follow();
      if (isOn()) refresh();
    }
  });
  live.hidden = false;
  follow();
}
