// What all pages do: the key / goes to the search, and filters that are not set stay out of the URL.
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    document.querySelector(".jump input")?.focus();
  }
});

for (const form of document.querySelectorAll("form.filters")) {
  form.addEventListener("formdata", ({ formData }) => {
    for (const [name, value] of [...formData]) if (value === "") formData.delete(name);
  });
}
