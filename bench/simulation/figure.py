"""A figure's points, their medians and spread, its table and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

from ..timing import Spread, print_table, show, spread

Figures = Mapping[str, float]
_MARKS = "osD^vP"


@dataclass(frozen=True, slots=True)
class Point:
    """What one run gave: the arm, where it stands on the x axis, the seed, and its figures by name."""

    arm: str
    x: float
    seed: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class Figure:
    """``paper``: the original's figures by arm, those of a sweep as ``name @ x``."""

    number: str
    title: str
    points: Sequence[Point]
    x_label: str = ""
    paper: Mapping[str, Figures] = field(default_factory=dict)
    log_y: bool = False
    notes: Sequence[str] = ()

    @property
    def arms(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(point.arm for point in self.points))

    @property
    def xs(self) -> list[float]:
        """Ascending."""
        return sorted({point.x for point in self.points})

    @property
    def names(self) -> list[str]:
        """What is measured."""
        return list(self.points[0].figures)

    def at(self, arm: str, x: float, name: str) -> Spread | None:
        """Median and range over the seeds."""
        values = [p.figures[name] for p in self.points if (p.arm, p.x) == (arm, x)]
        return spread(values) if values else None

    def record(self) -> dict[str, Any]:
        """For the stored result."""
        rows = [
            {
                "arm": arm,
                **({"x": x} if self.x_label else {}),
                **{name: self.at(arm, x, name) for name in self.names},
            }
            for arm in self.arms
            for x in self.xs
            if self.at(arm, x, self.names[0]) is not None
        ]
        num_seeds = len({point.seed for point in self.points})
        record: dict[str, Any] = {
            "title": self.title,
            "seeds": num_seeds,
            "rows": rows,
            "paper": dict(self.paper),
        }
        if self.x_label:
            record["x"] = self.x_label
        if self.notes:
            record["notes"] = list(self.notes)
        return record

    def print(self) -> None:
        """Median (least to most) and the paper's figure, where it has one."""
        rows = []
        for arm in self.arms:
            for x in self.xs:
                spreads = {name: self.at(arm, x, name) for name in self.names}
                if all(value is None for value in spreads.values()):
                    continue
                cells = [show(value, 1) if value else "" for value in spreads.values()]
                paper = [self._paper_cell(arm, x)] if self.paper else []
                rows.append((arm, *([f"{x:g}"] if self.x_label else []), *cells, *paper))
        columns = ("arm", *([self.x_label] if self.x_label else []), *self.names)
        columns += ("paper",) if self.paper else ()
        print_table(f"Figure {self.number}: {self.title}", columns, rows, width=160)
        for note in self.notes:
            print(note)

    def _paper_cell(self, arm: str, x: float) -> str:
        paper = self.paper.get(arm, {})
        values = [paper.get(f"{name} @ {x:g}", paper.get(name)) for name in self.names]
        return " / ".join(f"{value:g}" for value in values if value is not None)

    def draw(self, path: Path) -> None:
        """One panel per thing measured: lines over x, or bars."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot, ticker

        chart, panels = pyplot.subplots(
            1,
            len(self.names),
            figsize=(max(6.0, 4.2 * len(self.names) + (1.6 if self.x_label else 0.0)), 3.4),
            squeeze=False,
            layout="constrained",
        )
        for panel, name in zip(panels[0], self.names, strict=True):
            (self._lines if self.x_label else self._bars)(panel, name)
            panel.set_title(name, fontsize=9)
            panel.tick_params(labelsize=8)
            panel.grid(axis="y", alpha=0.3)
            if self.log_y:
                panel.set_yscale("log")
                panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
                panel.yaxis.set_major_formatter("{x:g}")
                panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        if self.x_label:
            chart.legend(
                *panels[0][0].get_legend_handles_labels(),
                loc="outside right center",
                fontsize=7,
                title="dotted: the paper" if self.paper else None,
                title_fontsize=7,
            )
        chart.suptitle(fill(f"Figure {self.number}: {self.title} (simulated)", 75), fontsize=9)
        chart.savefig(path, dpi=90)
        pyplot.close(chart)

    def _lines(self, panel: Any, name: str) -> None:
        """Arms that coincide stay visible: later ones have larger, hollow marks, every other is dashed."""
        for place, arm in enumerate(self.arms):
            spreads = [(x, value) for x in self.xs if (value := self.at(arm, x, name))]
            xs, medians = [x for x, _ in spreads], [value["median"] for _, value in spreads]
            below = [value["median"] - value["least"] for _, value in spreads]
            above = [value["most"] - value["median"] for _, value in spreads]
            (line, *_) = panel.errorbar(
                xs,
                medians,
                yerr=[below, above],
                marker=_MARKS[place % len(_MARKS)],
                ms=3 + 1.6 * place,
                mfc="none" if place else None,
                ls=(3 * place, (4, 4)) if place % 2 else "-",
                lw=1.2,
                capsize=2,
                label=arm,
            )
            paper = [
                (x, self.paper[arm][key]) for x in xs if (key := f"{name} @ {x:g}") in self.paper.get(arm, {})
            ]
            if paper:
                panel.plot(*zip(*paper, strict=True), ls=":", lw=1, color=line.get_color())
        panel.set_xlabel(self.x_label, fontsize=8)

    def _bars(self, panel: Any, name: str) -> None:
        spreads = [(arm, value) for arm in self.arms if (value := self.at(arm, self.xs[0], name))]
        for place, (arm, value) in enumerate(spreads):
            error = [[value["median"] - value["least"]], [value["most"] - value["median"]]]
            panel.barh(place, value["median"], xerr=error, capsize=2, height=0.6)
            paper = self.paper.get(arm, {}).get(name)
            if paper is not None:
                panel.annotate(f"  paper {paper:g}", (value["most"], place), fontsize=7, va="center")
        panel.set_xlim(0, 1.45 * max(value["most"] for _, value in spreads))
        panel.set_yticks(range(len(spreads)), [arm for arm, _ in spreads], fontsize=7)
        panel.invert_yaxis()
