// The theme, dark or light: that of the system until the button `#theme` of any page is pressed; stored for all pages.
// A classic script in the head, so that the first paint has the right colours.
"use strict";

{
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try {
      return localStorage.getItem("quire.theme");
    } catch {
      return null; // storage may be forbidden
    }
  };
  const apply = (theme) => {
    if (theme === "dark" || theme === "light") root.dataset.theme = theme;
    else delete root.dataset.theme;
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  apply(kept());
  addEventListener("storage", (event) => event.key === "quire.theme" && apply(event.newValue));
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (!button) return;
    const label = () => {
      const text = isDark() ? "Use light colours" : "Use dark colours";
      button.setAttribute("aria-label", text);
      button.title = text;
    };
    label();
    system.addEventListener("change", label);
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      apply(theme);
      label();
      try {
        localStorage.setItem("quire.theme", theme);
      } catch {
        // The choice holds for this visit only.
      }
    });
  });
}
