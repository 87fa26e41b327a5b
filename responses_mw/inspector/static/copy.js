// Let the buttons next to code copy it.
export function addCopying(root) {
  if (!navigator.clipboard) return;
  for (const button of root.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.dataset.copy ?? button.nextElementSibling.textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
  }
}
