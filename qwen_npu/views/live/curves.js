// Curves over ticks, a few panels on one canvas; the legend tells the values at the cursor.
const HIGH = 210, HEAD = 24, FOOT = 22, LEFT = 66, GAP = 14;
const DASHES = { solid: [], dot: [2, 3], dash: [7, 3, 2, 3] };

function look(el) {
  const named = getComputedStyle(el).getPropertyValue("--jp-layout-color0").trim();
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = named || (matchMedia("(prefers-color-scheme: dark)").matches ? "#16181d" : "#ffffff");
  const paper = probe.fillStyle, part = (i) => parseInt(paper.slice(i, i + 2), 16);
  const dark = paper[0] === "#" && part(1) + part(3) + part(5) < 384;
  return dark
    ? { paper, dark, text: "#f0f0f0", soft: "#b4b4b4", line: "#3a3a3a" }
    : { paper, dark, text: "#1a1a1a", soft: "#595959", line: "#e2e2e2" };
}

// On a dark page the deep colours are lifted towards white, so that thin lines keep a contrast of 3.
function lifted(colour, dark) {
  if (!dark) return colour;
  const part = (i) => Math.round(parseInt(colour.slice(i, i + 2), 16) * 0.68 + 255 * 0.32);
  return `rgb(${part(1)},${part(3)},${part(5)})`;
}

function words(bytes, kind) {
  if (!bytes) return new kind(0);
  return new kind(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
}

function told(value, unit) {
  if (Number.isNaN(value)) return "–";
  if (value === 0) return "0 " + (unit === "bytes" ? "B" : unit);
  if (unit !== "bytes") return value.toPrecision(3) + " " + unit;
  for (const name of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || name === "GiB") return (name === "B" || value >= 100 ? value.toFixed(0) : value.toFixed(1)) + " " + name;
    value /= 1024;
  }
}

function marks(high, unit) {
  const rough = Math.max(high, 1e-9) / 3;
  const step = unit === "bytes" ? 2 ** Math.ceil(Math.log2(Math.max(rough, 1))) : [1, 2, 5, 10].map((f) => f * 10 ** Math.floor(Math.log10(rough))).find((v) => v >= rough);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

function render({ model, el }) {
  el.classList.add("qn-curves");
  const canvas = document.createElement("canvas"), legend = document.createElement("div");
  canvas.setAttribute("role", "img");
  legend.className = "qn-legend";
  el.append(canvas, legend);
  let frame = 0, width = 0;
  const get = (name) => model.get(name);
  const schedule = () => { if (!frame) frame = requestAnimationFrame(draw); };

  function geometry() {
    const n = get("panels").length, wide = width / n;
    return get("panels").map((panel, i) => ({ ...panel, x: i * wide + LEFT, w: wide - LEFT - GAP, y: HEAD, h: HIGH - HEAD - FOOT }));
  }

  function draw() {
    frame = 0;
    width = el.clientWidth || 900;
    const theme = look(el), ratio = devicePixelRatio || 1, g = canvas.getContext("2d");
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(HIGH * ratio);
      canvas.style.cssText = `width:${width}px;height:${HIGH}px;display:block`;
    }
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = theme.paper;
    g.fillRect(0, 0, width, HIGH);
    g.textBaseline = "middle";
    const x = words(get("x"), Int32Array), y = words(get("y"), Float64Array), lines = get("lines");
    const low = x.length ? x[0] : 0, span = x.length > 1 ? x[x.length - 1] - low : 1;
    const at = x.indexOf(get("cursor"));
    canvas.setAttribute("aria-label", get("panels").map((panel) => panel.title).join(", "));
    Object.assign(el.dataset, { points: x.length, cursor: get("cursor") });
    geometry().forEach((panel, p) => {
      const own = lines.map((line, i) => [line, i]).filter(([line]) => line.panel === p);
      let high = 0;
      for (const [, i] of own) for (let k = 0; k < x.length; k++) if (y[i * x.length + k] > high) high = y[i * x.length + k];
      high = (high || 1) * 1.08;
      const px = (tick) => panel.x + ((tick - low) / span) * panel.w, py = (v) => panel.y + panel.h * (1 - v / high);
      g.font = "600 12.5px system-ui, sans-serif";
      g.textAlign = "left";
      g.fillStyle = theme.text;
      g.fillText(panel.title, panel.x, HEAD / 2);
      g.font = "400 11px system-ui, sans-serif";
      for (const mark of marks(high, panel.unit)) {
        g.strokeStyle = theme.line;
        g.beginPath(); g.moveTo(panel.x, py(mark)); g.lineTo(panel.x + panel.w, py(mark)); g.stroke();
        g.fillStyle = theme.soft;
        g.textAlign = "right";
        g.fillText(told(mark, panel.unit).replace(/\.0 /, " "), panel.x - 6, py(mark));
      }
      g.textAlign = "center";
      for (const [tick, label] of get("marks")) g.fillText(label, px(tick), HIGH - FOOT / 2);
      for (const [line, i] of own) {
        g.strokeStyle = g.fillStyle = lifted(line.colour, theme.dark);
        g.lineWidth = 2;
        g.setLineDash(DASHES[line.dash]);
        g.beginPath();
        let up = true;
        for (let k = 0; k < x.length; k++) {
          const value = y[i * x.length + k];
          if (Number.isNaN(value)) { up = true; continue; }
          if (up) g.moveTo(px(x[k]), py(value)); else g.lineTo(px(x[k]), py(value));
          up = false;
        }
        g.stroke();
        g.setLineDash([]);
        const value = at < 0 ? NaN : y[i * x.length + at];
        if (!Number.isNaN(value)) { g.beginPath(); g.arc(px(x[at]), py(value), 3.5, 0, 7); g.fill(); }
      }
      g.lineWidth = 1;
      if (x.length && get("cursor") >= low && get("cursor") <= low + span) {
        g.strokeStyle = theme.text;
        g.setLineDash([3, 3]);
        g.beginPath(); g.moveTo(px(get("cursor")), panel.y); g.lineTo(px(get("cursor")), panel.y + panel.h); g.stroke();
        g.setLineDash([]);
      }
    });
    drawLegend(lines, y, x.length, at, theme);
  }

  function drawLegend(lines, y, n, at, theme) {
    legend.style.display = "grid";
    legend.style.gridTemplateColumns = `repeat(${get("panels").length}, 1fr)`;
    legend.replaceChildren(...get("panels").map((panel, p) => {
      const box = document.createElement("div");
      box.style.paddingLeft = LEFT + "px";
      lines.forEach((line, i) => {
        if (line.panel !== p) return;
        const item = document.createElement("span"), swatch = document.createElement("span");
        swatch.style.cssText = `display:inline-block;width:22px;margin-right:6px;vertical-align:3px;border-top:2.5px ${{ solid: "solid", dot: "dotted", dash: "dashed" }[line.dash]} ${lifted(line.colour, theme.dark)}`;
        item.style.cssText = `margin-right:14px;color:${theme.text}`;
        item.append(swatch, `${line.name} ${at < 0 ? "" : told(y[i * n + at], panel.unit)}`);
        box.append(item);
      });
      return box;
    }));
  }

  function onClick(event) {
    const at = canvas.getBoundingClientRect(), mouse = event.clientX - at.left, x = words(get("x"), Int32Array);
    const panel = geometry().find((one) => mouse >= one.x - 8 && mouse <= one.x + one.w + 8);
    if (!panel || !x.length) return;
    const share = Math.min(1, Math.max(0, (mouse - panel.x) / panel.w)), wanted = x[0] + share * (x[x.length - 1] - x[0]);
    model.set("cursor", x.reduce((best, tick) => (Math.abs(tick - wanted) < Math.abs(best - wanted) ? tick : best)));
    model.save_changes();
  }

  const drawn = ["x", "y", "lines", "panels", "marks", "cursor"];
  drawn.forEach((name) => model.on("change:" + name, schedule));
  canvas.addEventListener("click", onClick);
  const size = new ResizeObserver(schedule);
  size.observe(el);
  const themes = new MutationObserver(() => { schedule(); setTimeout(schedule, 400); });
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
  schedule();
  return () => {
    cancelAnimationFrame(frame);
    size.disconnect();
    themes.disconnect();
    drawn.forEach((name) => model.off("change:" + name, schedule));
    el.replaceChildren();
  };
}

export default { render };
