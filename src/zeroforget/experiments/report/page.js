// Draws every chart of the page; draws them again when the theme changes or a method is hidden.
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const boxes = [...document.querySelectorAll(".chart")];
  const hidden = new Set();
  const tip = document.getElementById("tip");
  const options = { mode: "vega-lite", renderer: "svg", actions: false, defaultStyle: false, tooltip };
  let round = 0;

  // "theme(ink)" stands for the CSS variable --ink.
  function themed(spec) {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => JSON.stringify(style.getPropertyValue("--" + name).trim());
    return JSON.parse(JSON.stringify(spec).replace(/"theme\(([a-z0-9-]+)\)"/g, (_, name) => value(name)));
  }

  // Columns to rows; a column of words is a list of words and the place of each row's word in it.
  function rows(columns) {
    const names = Object.keys(columns);
    const list = (column) => column.places?.map((place) => column.words[place]) ?? column;
    const lists = names.map((name) => list(columns[name]));
    const all = (lists[0] ?? []).map((_, row) => Object.fromEntries(names.map((name, i) => [name, lists[i][row]])));
    return all.filter((row) => !hidden.has(row.method));
  }

  function tooltip(_, event, __, value) {
    tip.hidden = value == null || value === "";
    if (tip.hidden) return;
    tip.replaceChildren(...Object.entries(value).flatMap(([name, shown]) => {
      const [key, text] = [document.createElement("span"), document.createElement("b")];
      key.textContent = name;
      text.textContent = shown;
      return [key, text];
    }));
    const at = event.touches?.[0] ?? event;
    tip.style.left = Math.max(4, Math.min(at.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(4, Math.min(at.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
  }

  async function draw(box) {
    const chart = report.charts[box.dataset.chart];
    try {
      const spec = themed(report.specs[chart.spec]);
      spec.description = chart.description;
      spec.datasets = { ...spec.datasets, rows: rows(chart.data) };
      box.drawing?.finalize();
      box.drawing = await vegaEmbed(box, spec, options);
      box.dataset.drawn = "yes";
    } catch (error) {
      box.dataset.drawn = "failed";
      box.className = "chart failed";
      box.textContent = "This chart could not be drawn: " + error.message;
      console.error(error);
    }
  }

  // One after another, so that the page answers meanwhile; a newer round ends an older one.
  async function drawAll() {
    const mine = ++round;
    document.body.dataset.ready = "no";
    for (const box of boxes) {
      if (mine !== round) return;
      await draw(box);
    }
    document.body.dataset.ready = "yes";
  }

  for (const button of document.querySelectorAll(".key button")) {
    button.addEventListener("click", () => {
      const show = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(show));
      hidden[show ? "delete" : "add"](button.dataset.method);
      drawAll();
    });
  }
  for (const radio of document.querySelectorAll("input[data-quantity]")) {
    radio.addEventListener("change", () => {
      const section = radio.closest("section");
      for (const box of section.querySelectorAll("[data-curves]")) {
        box.dataset.chart = JSON.parse(box.dataset.curves)[radio.dataset.quantity];
      }
      drawAll();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  drawAll();
})();
