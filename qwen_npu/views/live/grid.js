// A grid of cells over ticks, drawn on one canvas: residency lanes and slot pools. What a cell means is decided in
// Python; here a cell is four bytes: colour, strength, pattern, glyph.
const ROW = 21, BUS = 34, HEAD = 22, LEFT = 150, RIGHT = 236, SHARES = [0, 0.2, 0.5, 1];

function luminance(rgb) {
  const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(rgb[0]) + 0.7152 * part(rgb[1]) + 0.0722 * part(rgb[2]);
}

function parse(colour) {
  const hex = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(colour.trim());
  if (hex) return hex.slice(1).map((v) => parseInt(v, 16));
  const short = /^#([0-9a-f])([0-9a-f])([0-9a-f])$/i.exec(colour.trim());
  if (short) return short.slice(1).map((v) => parseInt(v + v, 16));
  const rgb = /rgba?\(([^)]+)\)/.exec(colour);
  return rgb ? rgb[1].split(/[ ,/]+/).slice(0, 3).map(Number) : null;
}

function css(rgb) {
  return `rgb(${rgb.map(Math.round).join(",")})`;
}

function mix(one, other, share) {
  return one.map((v, i) => v * share + other[i] * (1 - share));
}

// The page's own colours: JupyterLab's theme where there is one, else what the page inherits.
function look(el) {
  const style = getComputedStyle(el);
  const named = (name) => parse(style.getPropertyValue(name) || "");
  const paper = named("--jp-layout-color0") || (matchMedia("(prefers-color-scheme: dark)").matches ? [22, 24, 29] : [255, 255, 255]);
  const dark = luminance(paper) < 0.25;
  const text = dark ? [240, 240, 240] : [26, 26, 26];
  return { paper, dark, text, soft: mix(text, paper, 0.72), line: mix(text, paper, 0.18), band: mix(text, paper, 0.05) };
}

function words(bytes, kind) {
  if (!bytes) return new kind(0);
  const whole = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  return new kind(whole);
}

function drawCell(g, theme, x, y, w, h, colour, strength, pattern, glyph) {
  const base = parse(colour) || [138, 138, 138];
  const fill = mix(base, theme.paper, SHARES[strength] ?? 1);
  g.fillStyle = css(fill);
  g.fillRect(x, y, w, h);
  const ink = luminance(fill) > 0.18 ? "#000" : "#fff";
  if (pattern) {
    g.save();
    g.beginPath();
    g.rect(x, y, w, h);
    g.clip();
    g.strokeStyle = g.fillStyle = css(strength > 2 ? mix(parse(ink === "#000" ? "#000000" : "#ffffff"), fill, 0.55) : mix(base, theme.text, 0.8));
    g.lineWidth = 1;
    g.beginPath();
    if (pattern === 1) for (let d = -h; d < w; d += 6) { g.moveTo(x + d, y + h); g.lineTo(x + d + h, y); }
    if (pattern === 3) { g.moveTo(x, y); g.lineTo(x + w, y + h); g.moveTo(x, y + h); g.lineTo(x + w, y); }
    g.stroke();
    if (pattern === 2) for (let i = x + 3; i < x + w; i += 6) for (let j = y + 3; j < y + h; j += 6) g.fillRect(i, j, 1.5, 1.5);
    g.restore();
  }
  const size = w >= 8 * glyph.length + 2 ? 11 : 9;
  if (glyph && w >= 0.62 * size * glyph.length + 1) {
    g.font = `600 ${size}px system-ui, sans-serif`;
    g.textAlign = "center";
    if (pattern) { g.fillStyle = css(fill); g.fillRect(x + w / 2 - 4 * glyph.length - 1, y + 3, 8 * glyph.length + 2, h - 6); }
    g.fillStyle = ink;
    g.fillText(glyph, x + w / 2, y + h / 2 + 0.5);
  }
}

function render({ model, el }) {
  el.classList.add("qn-grid");
  const box = document.createElement("div");
  box.tabIndex = 0;
  box.dataset.lmSuppressShortcuts = "true";
  box.setAttribute("role", "group");
  const canvas = document.createElement("canvas");
  const tip = document.createElement("div");
  tip.className = "qn-tip";
  tip.hidden = true;
  const line = document.createElement("div");
  line.className = "qn-line";
  line.setAttribute("aria-live", "polite");
  const legend = document.createElement("div");
  legend.className = "qn-legend";
  box.append(canvas, tip);
  el.append(box, line, legend);

  let frame = 0, places = [], width = 0, hover = null, asked = 0, theme = look(el);

  const get = (name) => model.get(name);
  const span = () => Math.max(1, get("columns").length);
  const columnWidth = () => Math.max(3, (width - LEFT - RIGHT) / span());

  function schedule() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function layout() {
    places = [];
    let y = HEAD;
    for (const row of get("rows")) {
      const high = row.bus ? BUS : ROW;
      places.push({ y, high });
      y += high;
    }
    return y + 4;
  }

  function draw() {
    frame = 0;
    width = (el.clientWidth || 900) - 2;  // the box has a border
    theme = look(el);
    const rows = get("rows"), columns = get("columns"), side = get("side"), palette = get("palette"), glyphs = get("glyphs");
    const high = layout(), ratio = devicePixelRatio || 1, cw = columnWidth();
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.width = width + "px";
      canvas.style.height = high + "px";
    }
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.textBaseline = "middle";
    g.fillStyle = css(theme.paper);
    g.fillRect(0, 0, width, high);
    const cells = words(get("cells"), Uint8Array), first = get("first"), cursor = get("cursor") - first;
    const right = LEFT + cw * columns.length;
    rows.forEach((row, r) => {
      const { y, high } = places[r];
      if (row.band) { g.fillStyle = css(theme.band); g.fillRect(0, y, width, high); }
      if (row.bus) {
        g.strokeStyle = css(theme.soft);
        g.setLineDash([4, 4]);
        g.beginPath(); g.moveTo(LEFT, y + high / 2); g.lineTo(right, y + high / 2); g.stroke();
        g.setLineDash([]);
      }
      g.font = (row.id === get("picked") ? "700" : "400") + " 12px system-ui, sans-serif";
      g.textAlign = "right";
      g.fillStyle = css(row.bus ? theme.soft : theme.text);
      g.fillText(row.label, LEFT - 10, y + high / 2, LEFT - 16);
      g.textAlign = "left";
      g.font = "400 12px system-ui, sans-serif";
      g.fillText(side[r] || "", right + 10, y + high / 2, width - right - 14);
      if (row.bus) return;
      for (let c = 0; c < columns.length; c++) {
        const at = 4 * (r * columns.length + c);
        if (!cells[at + 1] && !cells[at + 3]) continue;
        drawCell(g, theme, LEFT + c * cw + 0.5, y + 1.5, Math.max(1, cw - 1), high - 3, palette[cells[at]] || "#8A8A8A",
          cells[at + 1], cells[at + 2], glyphs[cells[at + 3]] || "");
      }
    });
    drawArrows(g, cw, columns.length);
    drawHead(g, cw, columns, first);
    if (cursor >= 0 && cursor < columns.length) {
      g.strokeStyle = css(theme.text);
      g.lineWidth = 2;
      g.strokeRect(LEFT + cursor * cw, HEAD - 2, cw, high - HEAD);
      g.lineWidth = 1;
    }
    const picked = rows.findIndex((row) => row.id && row.id === get("picked"));
    if (picked >= 0) {
      g.strokeStyle = css(theme.text);
      g.setLineDash([2, 2]);
      g.strokeRect(4, places[picked].y + 0.5, right - 4, places[picked].high - 1);
      g.setLineDash([]);
    }
    box.setAttribute("aria-label", `${get("title")}. Left and right: step. Up and down: row. Home, End: first, last. Space: play. Plus, minus: speed. Brackets: zoom.`);
    Object.assign(box.dataset, { tick: get("cursor"), picked: get("picked"), ticks: get("total"), rows: rows.length, first, dark: theme.dark, drawn: Number(box.dataset.drawn || 0) + 1 });
    if (line.textContent !== get("line")) line.textContent = get("line");
  }

  function drawHead(g, cw, columns, first) {
    g.font = "400 11px system-ui, sans-serif";
    g.textAlign = "center";
    let free = -1e9;
    columns.forEach((label, c) => {
      const x = LEFT + (c + 0.5) * cw, wide = g.measureText(label).width;
      if (!label || x - wide / 2 < free + 6) return;
      if (first + c !== get("cursor") && Math.abs(first + c - get("cursor")) * cw < wide + 8) return;
      g.fillStyle = css(first + c === get("cursor") ? theme.text : theme.soft);
      g.fillText(label, x, HEAD / 2);
      free = x + wide / 2;
    });
  }

  function drawArrows(g, cw, count) {
    const arrows = words(get("arrows"), Int32Array), of = new Map();
    for (let i = 0; i + 3 < arrows.length; i += 4) of.set(arrows[i], (of.get(arrows[i]) || 0) + 1);
    const nth = new Map(), ways = new Map(), bus = get("rows").findIndex((row) => row.bus), now = get("cursor") - get("first");
    g.strokeStyle = g.fillStyle = css(theme.text);
    const head = (x, y, up, size) => {
      g.beginPath(); g.moveTo(x, y); g.lineTo(x - size, y + (up ? size * 1.5 : -size * 1.5)); g.lineTo(x + size, y + (up ? size * 1.5 : -size * 1.5)); g.closePath(); g.fill();
    };
    for (let i = 0; i + 3 < arrows.length; i += 4) {
      const [c, from, to, up] = arrows.slice(i, i + 4);
      const n = nth.get(c) || 0;
      nth.set(c, n + 1);
      if (c < 0 || c >= count || !places[from] || !places[to]) continue;
      if (cw < 30 && c !== now) { ways.set(c, (ways.get(c) || 0) | (up ? 1 : 2)); continue; }  // lines would be a thicket
      const x = LEFT + c * cw + (cw * (n + 0.5)) / of.get(c);
      const y0 = places[from].y + places[from].high / 2, y1 = places[to].y + places[to].high / 2, way = Math.sign(y1 - y0);
      const tipY = y1 - way * (places[to].high / 2 - 3);
      g.globalAlpha = 0.8;
      g.setLineDash(up ? [] : [2, 2]);
      g.beginPath(); g.moveTo(x, y0 + way * (places[from].high / 2 - 3)); g.lineTo(x, tipY); g.stroke();
      g.setLineDash([]);
      head(x, tipY, way < 0, Math.min(4, cw / of.get(c) / 2 + 1));
      g.globalAlpha = 1;
    }
    if (bus < 0) return;
    const middle = places[bus].y + places[bus].high / 2;
    for (const [c, way] of ways) {
      const x = LEFT + (c + 0.5) * cw, size = Math.min(4.5, cw / 2 - 0.5);
      if (way & 1) head(x, middle - 13, true, size);
      if (way & 2) head(x, middle + 13, false, size);
    }
  }

  function drawLegend() {
    legend.replaceChildren();
    for (const [colour, strength, pattern, glyph, text] of get("legend")) {
      const item = document.createElement("span"), swatch = document.createElement("canvas"), ratio = devicePixelRatio || 1;
      swatch.width = 20 * ratio; swatch.height = 14 * ratio;
      swatch.style.cssText = "width:20px;height:14px;vertical-align:-2px;margin-right:5px";
      const g = swatch.getContext("2d");
      g.scale(ratio, ratio);
      g.textBaseline = "middle";
      drawCell(g, theme, 0, 0, 20, 14, colour, strength, pattern, glyph);
      item.append(swatch, text);
      legend.append(item);
    }
  }

  function spot(event) {
    const at = canvas.getBoundingClientRect(), y = event.clientY - at.top;
    const column = Math.floor((event.clientX - at.left - LEFT) / columnWidth());
    const row = places.findIndex((place) => y >= place.y && y < place.y + place.high);
    const known = get("rows")[row];
    if (!known || column >= span()) return null;
    return { id: known.id, tick: column < 0 ? null : get("first") + column };
  }

  function go(tick) {
    model.set("cursor", Math.min(Math.max(0, tick), Math.max(0, get("total") - 1)));
    model.save_changes();
  }

  function pick(step) {
    const ids = get("rows").map((row) => row.id).filter(Boolean);
    if (!ids.length) return;
    const now = ids.indexOf(get("picked"));
    model.set("picked", ids[Math.min(Math.max(0, now < 0 ? 0 : now + step), ids.length - 1)]);
    model.save_changes();
  }

  function change(name, value) {
    model.set(name, value);
    model.save_changes();
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => go(get("cursor") - 1), ArrowRight: () => go(get("cursor") + 1),
      PageUp: () => go(get("cursor") - 10), PageDown: () => go(get("cursor") + 10),
      Home: () => go(0), End: () => go(get("total") - 1),
      ArrowUp: () => pick(-1), ArrowDown: () => pick(1),
      " ": () => change("playing", !get("playing")),
      "+": () => change("interval", Math.max(25, Math.round(get("interval") / 2))),
      "-": () => change("interval", Math.min(3200, get("interval") * 2)),
      "]": () => change("span", Math.max(8, Math.round(get("span") / 2))),
      "[": () => change("span", Math.min(320, get("span") * 2)),
      Escape: () => change("picked", ""),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  function onMove(event) {
    const at = spot(event);
    if (!at || !at.id || at.tick === null) { hover = null; tip.hidden = true; return; }
    const x = event.clientX - box.getBoundingClientRect().left, y = event.clientY - box.getBoundingClientRect().top;
    tip.style.left = Math.min(x + 14, Math.max(0, width - 340)) + "px";
    tip.style.top = y + 16 + "px";
    if (hover && hover.id === at.id && hover.tick === at.tick) return;
    hover = at;
    tip.hidden = true;
    clearTimeout(asked);
    asked = setTimeout(() => model.send({ hover: [at.id, at.tick] }), 40);
  }

  function onAnswer(message) {
    if (!message.tip || !hover || message.id !== hover.id || message.tick !== hover.tick) return;
    tip.textContent = message.tip;
    tip.hidden = false;
  }

  function onClick(event) {
    const at = spot(event);
    if (!at) return;
    if (at.id) model.set("picked", at.id);
    if (at.tick !== null) model.set("cursor", Math.min(at.tick, get("total") - 1));
    model.save_changes();
  }

  const onLeave = () => { hover = null; tip.hidden = true; clearTimeout(asked); };
  const repaint = () => { schedule(); drawLegend(); };
  const drawn = ["rows", "columns", "cells", "arrows", "side", "first", "cursor", "picked", "total", "line"];
  drawn.forEach((name) => model.on("change:" + name, schedule));
  model.on("change:legend", drawLegend);
  model.on("msg:custom", onAnswer);
  box.addEventListener("keydown", onKey);
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerleave", onLeave);
  canvas.addEventListener("click", onClick);
  const size = new ResizeObserver(schedule);
  size.observe(el);
  const themes = new MutationObserver(() => { repaint(); setTimeout(repaint, 400); });
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
  repaint();

  return () => {
    cancelAnimationFrame(frame);
    clearTimeout(asked);
    size.disconnect();
    themes.disconnect();
    drawn.forEach((name) => model.off("change:" + name, schedule));
    model.off("change:legend", drawLegend);
    model.off("msg:custom", onAnswer);
    el.replaceChildren();
  };
}

export default { render };
