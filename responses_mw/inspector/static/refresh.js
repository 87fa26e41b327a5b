// Show the current state of the page every few seconds. A pause, an open confirmation or a focused button keep it in place.
const live = document.querySelector("[data-refresh]");
if (live) {
  const button = live.querySelector("button");
  const isOn = () => button.getAttribute("aria-pressed") === "true";
  const isUsed = (part) => part.querySelector("details[open], :focus:not([role=region])");

  async function refresh() {
    const shown = document.getElementById("refreshed");
    if (document.hidden || !isOn() || isUsed(shown)) return;
    const answer = await fetch(location.href).catch(() => null); // the server may be restarting
    if (!answer?.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("refreshed"); // missing if the session has ended
    if (fresh && isOn() && !isUsed(shown)) shown.replaceChildren(...fresh.childNodes);
  }

  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(!isOn()));
    refresh();
  });
  live.hidden = false;
  setInterval(refresh, Number(live.dataset.refresh) * 1000);
}
