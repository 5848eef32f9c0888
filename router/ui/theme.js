// Theme of both pages: the system's, or the one chosen here. Not a module: it runs before the first paint.

(() => {
  const KEY = "baton.theme";
  const root = document.documentElement;

  const apply = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  };

  // A browser that blocks storage throws; the choice then holds for this page only.
  const read = () => {
    try {
      return localStorage.getItem(KEY) ?? "system";
    } catch {
      return "system";
    }
  };
  const write = (theme) => {
    try {
      if (theme === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, theme);
    } catch {
      console.info("the browser blocks storage: the theme is not kept");
    }
  };

  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = root.dataset.theme ?? "system";
    select.addEventListener("change", () => {
      apply(select.value);
      write(select.value);
    });
  });
})();
