"""The cockpit's widgets: laid out, linked, brought up to date, closed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from qwen_npu.runtime.context import KV_POLICIES, STATE_PLACES
from qwen_npu.views.live import lanes, norms, panes, pool
from qwen_npu.views.live.curves import Curves
from qwen_npu.views.live.grid import Grid, Picture
from qwen_npu.views.live.lanes import Filter

if TYPE_CHECKING:
    from qwen_npu.views.live.cockpit import Cockpit

CURVES_SECONDS = 0.5
"""Shortest time between two drawings of the curves while decoding."""
_SPEEDS = {"1 a second": 1000, "2.5 a second": 400, "5 a second": 200, "10 a second": 100, "20 a second": 50}


class Panel:
    """Widgets of one cockpit. Everything here runs on the kernel's main thread."""

    def __init__(self, cockpit: Cockpit) -> None:
        self._cockpit = cockpit
        self._moving = False
        self._curves_at = 0.0
        self._window: int | None = None
        self._links: list[Any] = []
        guard = cockpit.guarded

        # what the run is to be
        settings = cockpit.settings
        self.prompt = w.Textarea(settings.prompt, rows=2, layout=w.Layout(width="98%", height="52px"))
        self.picture = w.Dropdown(options=_pictures(settings.image), value=settings.image, description="picture")
        self.thumbnail = w.Image(value=b"", format="png", layout=w.Layout(height="96px", object_fit="contain"))
        devices = tuple(dict.fromkeys((settings.device, "ascend:0", "cpu")))
        self.device = w.Dropdown(options=devices, value=settings.device, description="device")
        self.state = w.Dropdown(options=STATE_PLACES, value=settings.state, description="state")
        self.kv = w.Dropdown(options=KV_POLICIES, value=settings.kv, description="KV")
        self.numerics = w.Dropdown(options=("device", "f32"), value=settings.numerics, description="numerics")
        self.drafts = w.BoundedIntText(value=settings.speculate, min=0, max=7, description="drafts")
        self.tokens = w.BoundedIntText(value=settings.max_new_tokens, min=1, max=100_000, description="tokens")
        self.ignore_eos = w.Checkbox(
            settings.ignore_eos, description="go on after the end", indent=False, layout=w.Layout(width="190px")
        )
        self.peek = w.Checkbox(settings.peek, description="peek at norms", indent=False, layout=w.Layout(width="140px"))
        for control in (self.picture, self.device, self.state, self.kv, self.numerics, self.drafts, self.tokens):
            control.layout.width = "190px"
            control.style.description_width = "64px"
        self.run = w.Button(description="Run", icon="play", button_style="primary", tooltip="Decode to the end")
        self.step = w.Button(description="Step", icon="step-forward", tooltip="One stage or one decode step")
        self.pause = w.Button(description="Pause", icon="pause", tooltip="Stop after the step under way")
        self.reset = w.Button(
            description="Reset", icon="refresh", tooltip="End this run; the next has the settings above"
        )
        for button in (self.run, self.step, self.pause, self.reset):
            button.layout.width = "90px"
        self.run.on_click(guard(lambda _: self._start(cockpit.run)))
        self.step.on_click(guard(lambda _: self._start(cockpit.step)))
        self.pause.on_click(guard(lambda _: cockpit.pause()))
        self.reset.on_click(guard(lambda _: cockpit.reset()))
        self.picture.observe(guard(lambda _: self._thumbnail()), "value")
        self.read_on = w.Button(description="Read on", icon="refresh", tooltip="Take in what was recorded since")
        self.read_on.on_click(guard(lambda _: cockpit.read_on()))

        # what is said
        self.status = w.HTML()
        self.light = w.HTML()
        self.strip = w.HTML()
        self.text = w.HTML(layout=w.Layout(width="100%"))
        self.instant = w.HTML(layout=w.Layout(flex="1 1 340px"))
        self.buffer = w.HTML(layout=w.Layout(flex="1 1 340px"))

        # one scrubber
        self.play = w.Play(min=0, max=0, value=0, interval=400, show_repeat=False)
        self.slider = w.IntSlider(
            min=0, max=0, value=0, description="tick", readout=True, layout=w.Layout(flex="1 1 300px")
        )
        self.slider.style.description_width = "34px"
        self.speed = w.Dropdown(options=_SPEEDS, value=400, description="speed", layout=w.Layout(width="180px"))
        self.speed.style.description_width = "48px"
        self.follow = w.ToggleButton(not cockpit.replay, description="follow", tooltip="Stay at the newest tick")
        self.follow.layout.width = "90px"
        self.slider.observe(guard(self._scrubbed), "value")
        self.speed.observe(guard(lambda change: setattr(self.play, "interval", change["new"])), "value")
        self.follow.observe(guard(self._followed), "value")

        # what is shown
        self.search = w.Text(placeholder="buffer id or tensor name", description="search", continuous_update=True)
        self.stage = w.Dropdown(options=[("every stage", "")], description="stage")
        self.layer = w.Dropdown(options=[("every layer", -1)], value=-1, description="layer")
        self.kind = w.Dropdown(options=[("every kind", "")], description="kind")
        for control in (self.search, self.stage, self.layer, self.kind):
            control.layout.width = "220px"
            control.style.description_width = "48px"
            control.observe(guard(self._filtered), "value")
        self.lanes = Grid(
            tip=self._lane_tip,
            title="Where the buffers live",
            palette=lanes.PALETTE,
            glyphs=lanes.GLYPHS,
        )
        self.slots = Grid(
            tip=self._slot_tip,
            title="Slots of the pool",
            palette=pool.PALETTE,
            glyphs=pool.GLYPHS,
            legend=pool.LEGEND,
        )
        self.lanes.observe(guard(lambda _: self.draw()), ["picked", "span"])
        self.slots.observe(guard(lambda _: self.draw()), ["picked", "span"])
        self.lanes.observe(guard(self._keyed_speed), "interval")
        self.curves = Curves()
        for grid in (self.lanes, self.slots):
            self._links += [
                w.jslink((self.slider, "value"), (grid, "cursor")),
                w.jslink((self.play, "playing"), (grid, "playing")),
                w.jslink((self.play, "interval"), (grid, "interval")),
            ]
        self._links.append(w.jslink((self.play, "value"), (self.slider, "value")))
        self._links.append(w.jslink((self.slider, "value"), (self.curves, "cursor")))
        self.norms = Grid(
            tip=lambda id_, head: f"{id_}, head {head}",
            title="Norms of the recurrent state",
            palette=norms.PALETTE,
            glyphs=norms.GLYPHS,
            legend=norms.LEGEND,
            cursor=-1,
        )
        self._slots_box = w.VBox(
            [_head("Slots of the pool"), self.slots], layout=w.Layout(display="none", overflow="hidden")
        )
        self._norms_box = w.VBox(
            [_head("Recurrent state by peek: L2 norm of each head"), self.norms],
            layout=w.Layout(display="none", overflow="hidden"),
        )
        self.widget = self._laid_out()
        self._thumbnail()

    def _laid_out(self) -> w.VBox:
        flow = {"flex_flow": "row wrap", "align_items": "center"}
        controls = [
            w.HBox(
                [w.VBox([self.prompt], layout=w.Layout(flex="1 1 300px", overflow="hidden")), self.thumbnail],
                layout=w.Layout(align_items="center"),
            ),
            w.HBox(
                [
                    self.picture,
                    self.device,
                    self.state,
                    self.kv,
                    self.numerics,
                    self.drafts,
                    self.tokens,
                    self.ignore_eos,
                    self.peek,
                ],
                layout=w.Layout(**flow),
            ),
            w.HBox([self.run, self.step, self.pause, self.reset, self.status], layout=w.Layout(**flow)),
        ]
        replay = [w.HBox([self.read_on, *([self.status] if self._cockpit.replay else [])], layout=w.Layout(**flow))]
        parts: list[Any]
        parts, unused = (replay, controls) if self._cockpit.replay else (controls, replay)
        self._unused = w.VBox(unused)  # held to be closed with the rest
        parts += [
            self.strip,
            self.text,
            w.HBox([self.play, self.slider, self.speed, self.follow], layout=w.Layout(**flow)),
            w.HBox([self.search, self.stage, self.layer, self.kind], layout=w.Layout(**flow)),
            self.lanes,
            self._slots_box,
            self.light,
            w.HBox([self.instant, self.buffer], layout=w.Layout(flex_flow="row wrap", align_items="flex-start")),
            self.curves,
            self._norms_box,
        ]
        box = w.VBox(parts, layout=w.Layout(width="100%", overflow="hidden"))
        box.add_class("qn-cockpit")
        return box

    # bringing up to date

    def refresh(self) -> None:
        """New data: everything that changed."""
        cockpit = self._cockpit
        frames = cockpit.frames
        total = len(frames.ticks) if frames is not None else 0
        last = max(0, total - 1)
        running = cockpit.status == "running"
        self._moving = True
        try:
            self.slider.max = self.play.max = last
            if self.follow.value or cockpit.cursor > last:
                cockpit.cursor = last
            self.slider.value = cockpit.cursor
        finally:
            self._moving = False
        self._offer_filters()
        self.draw()
        if not running or time.monotonic() - self._curves_at > CURVES_SECONDS:
            self._curves_at = time.monotonic()
            if frames is not None:
                self.curves.update(frames)
        self._say(running)
        self.alarm()

    def moved(self) -> None:
        """The cockpit's cursor was set by a call."""
        self.slider.value = self._cockpit.cursor
        self.draw()

    def draw(self) -> None:
        """The panes that depend on the cursor, the picked row or the filters."""
        cockpit = self._cockpit
        frames, cursor = cockpit.frames, cockpit.cursor
        if frames is None or not frames.ticks:
            empty = Picture(line="Nothing recorded yet: press Run or Step.")
            self.lanes.show(empty, 0)
            self._slots_box.layout.display = "none"
            self.text.value = "<i>The answer grows here.</i>"
            self.instant.value = self.buffer.value = ""
            return
        chosen = self._filter()
        ticks = lanes.shown_ticks(frames, cursor, self.lanes.span, chosen, self._window)
        self._window = ticks[0] if ticks else None
        picked = self.lanes.picked
        self.lanes.legend = lanes.legend(frames)
        self.lanes.show(lanes.lanes(frames, ticks, cursor, chosen, picked), len(frames.ticks))
        if cockpit.books is not None and cockpit.books.size:
            self._slots_box.layout.display = "flex"
            shown = lanes.shown_ticks(frames, cursor, self.slots.span, Filter(), self.slots.first)
            self.slots.show(pool.pool(frames, cockpit.books, shown, cursor, self.slots.picked), len(frames.ticks))
        else:
            self._slots_box.layout.display = "none"
        self.text.value = panes.answer(frames, cursor)
        self.instant.value = panes.instant(frames, cursor)
        self.buffer.value = panes.buffer(lanes.facts(frames, picked, cursor) if picked else {})
        if frames.peek_events:
            self._draw_norms()

    def alarm(self) -> None:
        """The error strip."""
        self.strip.value = panes.strip(self._cockpit.problems, self._cockpit.hazards)

    def close(self) -> None:
        """Closes every widget, and the links, layouts and styles with them."""
        for link in self._links:
            link.close()
        _close(self.widget)
        _close(self._unused)

    def _say(self, running: bool) -> None:
        cockpit = self._cockpit
        balanced, told = cockpit.balance()
        self.light.value = panes.light(balanced, told)
        frames = cockpit.frames
        meta = frames.meta if frames is not None else {}
        driver = meta.get("driver") or (cockpit.session.driver.name if cockpit.session is not None else "")
        device = meta.get("device") or (cockpit.session.driver.device if cockpit.session is not None else "")
        about = f"{driver} on {device}" if driver else "a recording"
        if driver == "emulator":
            about += ": bytes are exact, times are this CPU's"
        notes = cockpit.session.notes if cockpit.session is not None else ()
        words = {"empty": "ready", "done": "done", "running": "decoding", "paused": "paused", "failed": "failed"}
        state = words.get(cockpit.status, cockpit.status)
        self.status.value = (
            panes.status(state, good=cockpit.status != "failed") + f" <span>{' · '.join((about, *notes))}</span>"
        )
        self.run.disabled = self.step.disabled = running or cockpit.status in ("done", "failed")
        self.pause.disabled = not running

    def _offer_filters(self) -> None:
        frames = self._cockpit.frames
        if frames is None:
            return
        stages = [("every stage", ""), *((name, name) for name in dict.fromkeys(t.stage for t in frames.ticks) if name)]
        kinds = [("every kind", ""), *((name, name) for name in sorted({row.kind for row in frames.rows}))]
        names = (frames.meta.get("spec") or {}).get("layer_types") or []
        layers = [
            ("every layer", -1),
            *((f"{i} {'linear' if name == 'linear_attention' else 'full'}", i) for i, name in enumerate(names)),
        ]
        for control, options in ((self.stage, stages), (self.kind, kinds), (self.layer, layers)):
            if list(control.options) != options:
                value = control.value
                control.options = options
                control.value = value if value in [item[1] for item in options] else options[0][1]

    def _filter(self) -> Filter:
        layer = self.layer.value
        return Filter(
            self.search.value.strip(),
            self.stage.value or "",
            None if layer is None or layer < 0 else layer,
            self.kind.value or "",
        )

    def _draw_norms(self) -> None:
        """The peek of the cursor's step."""
        frames = self._cockpit.frames
        assert frames is not None
        picture = norms.norms(frames, self._cockpit.cursor)
        self._norms_box.layout.display = "none" if picture is None else "flex"
        if picture is not None:
            self.norms.show(picture, len(picture.columns))

    # what the user does

    def _start(self, action: Callable[[], None]) -> None:
        settings = self._cockpit.settings
        for name, control in (
            ("prompt", self.prompt),
            ("image", self.picture),
            ("device", self.device),
            ("state", self.state),
            ("kv", self.kv),
            ("numerics", self.numerics),
            ("speculate", self.drafts),
            ("peek", self.peek),
            ("max_new_tokens", self.tokens),
            ("ignore_eos", self.ignore_eos),
        ):
            setattr(settings, name, control.value)
        if self._cockpit.status == "empty":
            self.follow.value = True
            self._window = None
        action()

    def _scrubbed(self, change: dict[str, Any]) -> None:
        self._cockpit.cursor = change["new"]
        if self._moving:
            return
        self._moving = True
        try:  # leaving the newest tick ends the following, coming back to it does not begin it again
            if change["new"] < self.slider.max:
                self.follow.value = False
        finally:
            self._moving = False
        self.draw()

    def _followed(self, change: dict[str, Any]) -> None:
        if change["new"] and not self._moving:
            self.slider.value = self.slider.max

    def _filtered(self, _: Any) -> None:
        frames = self._cockpit.frames
        if frames is None:
            return
        device, host = lanes.shown_rows(frames, self._filter())
        if self.search.value and len(device) + len(host) == 1:
            self.lanes.picked = (device + host)[0].id
        self._window = None
        self.draw()

    def _keyed_speed(self, change: dict[str, Any]) -> None:
        nearest = min(_SPEEDS.values(), key=lambda interval: abs(math.log(interval / max(1, change["new"]))))
        if self.speed.value != nearest:
            self.speed.value = nearest

    def _thumbnail(self) -> None:
        from qwen_npu.data import image_path

        path = image_path(self.picture.value)
        self.thumbnail.layout.display = "none" if path is None else "block"
        if path is not None:
            self.thumbnail.value = path.read_bytes()

    def _lane_tip(self, id_: str, tick: int) -> str:
        return "" if self._cockpit.frames is None else lanes.tip(self._cockpit.frames, id_, tick)

    def _slot_tip(self, id_: str, tick: int) -> str:
        frames, books = self._cockpit.frames, self._cockpit.books
        if frames is None or books is None or not 0 <= tick < len(frames.ticks):
            return ""
        slot = pool.slots_at(frames, books, tick)[int(id_.removeprefix("slot "))]
        return f"{id_} after {frames.ticks[tick].label}\n{pool.words(slot)}"


def _pictures(chosen: str) -> list[tuple[str, str]]:
    from qwen_npu.data import data_dir

    names = [path.stem for path in sorted((data_dir() / "images").glob("*.png"))]
    options = [("none", ""), *((name.replace("_", " "), name) for name in names)]
    if chosen not in ("", *names):
        options.append((chosen, chosen))
    return options


def _head(text: str) -> w.HTML:
    return w.HTML(f"<b>{text}</b>")


def _close(widget: Any) -> None:
    for child in getattr(widget, "children", ()):
        _close(child)
    for part in ("layout", "style"):
        owned = getattr(widget, part, None)
        if isinstance(owned, w.Widget):
            owned.close()
    widget.close()
