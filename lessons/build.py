"""Make a site and notebooks from the lessons: a page and an .ipynb of each, with widgets that run.

    python lessons/build.py --out=site            # about a minute: it exports the model, too
    python -m http.server -d site                 # then open http://localhost:8000

Everything in the folder works without a network. A file that a lesson links to becomes a page, too.
`<!-- widget: NAME -->` in a lesson is where widgets/NAME.js appears.
"""

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import export
import mdlm
from nanomdlm.support.cli import entry, environment
from nanomdlm.support.errors import UserError
from nanomdlm.support.web import live_page
from nanomdlm.support.web.viewer import TAGS, bundle, read_asset

LESSONS = ROOT / "lessons"
WIDGETS = LESSONS / "widgets"
PACKAGES = {"markdown_it": "markdown-it-py", "mdit_py_plugins": "mdit-py-plugins"}
PACKAGES |= {"pygments": "pygments", "nbformat": "nbformat"}
KATEX = WIDGETS / "node_modules" / "katex" / "dist"
COPIED = {".png", ".svg", ".ipynb", ".jsonl"}  # what a browser shows or saves as it is
HOOK = re.compile(r"<!-- widget: ([\w-]+) -->")
INLINE = re.compile(r'(?<!">)<code>[^<]*</code>')  # in a text, not a block
# A sentence before a block of Python that says into which file it goes, or its first line.
SAVED = re.compile(
    r"(?:[Ss]ave (?:this|it) as|in\s+a\s+file)\s+`((?:\w+/)?\w+\.py)`[^`]*(?:`[^`]*`[^`]*)*\Z"
)
NAMED = re.compile(r"# (\w+\.py)\n")
# The first cell of a notebook.
SETUP = """# Run this first. In Colab, clone the repository before and install its requirements.txt.
import os, sys
from pathlib import Path

os.chdir(next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "mdlm.py").exists()))
os.makedirs("my", exist_ok=True)
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
sys.path.insert(0, os.getcwd())"""


def list_lessons():
    """The lessons in their order, then the pages without a number, README.md first of all."""
    numbered = sorted(
        LESSONS.glob("[0-9]*_*.md"), key=lambda p: (int(re.match(r"\d+", p.name)[0]), p)
    )
    others = [path for path in sorted(LESSONS.glob("*.md")) if path not in numbered]
    others.sort(key=lambda path: path.name != "README.md")
    return [others[0], *numbered, *others[1:]]


def title_of(path):
    """The first heading of a Markdown file, without its marks; of another file its name."""
    text = path.read_text(encoding="utf-8") if path.suffix == ".md" else ""
    match = re.search(r"^# (.+)$", text, re.M)
    return match[1].replace("`", "") if match else path.name


# ---- Pages
def make_renderer():
    """Markdown to HTML, with colored code and with mathematics as `typeset` takes it."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.anchors import anchors_plugin
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    def math(tex, options):
        return f'<math class="{options["display_mode"]}">{html.escape(tex, quote=False)}</math>'

    markdown = MarkdownIt("commonmark", {"html": True, "highlight": color}).enable("table")
    markdown.use(anchors_plugin, max_level=3)
    markdown.use(dollarmath_plugin, renderer=math, allow_space=False, allow_digits=False)
    return markdown


def install_katex():
    """Download KaTeX with npm, if it is not there."""
    npm = shutil.which("npm")
    if not npm:
        raise UserError("the site needs npm, a part of Node.js; install that (nodejs.org)")
    if not KATEX.is_dir():
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        if subprocess.run(command, cwd=WIDGETS, stdin=subprocess.DEVNULL).returncode:
            raise UserError(f"npm ci failed in {WIDGETS}; it needs a network the first time")


def typeset(body):
    """Typeset the formulas of a page, which `make_renderer` has marked."""
    found = re.findall(r'<math class="(\w+)">(.*?)</math>', body, re.S)
    if not found:
        return body
    formulas = [[html.unescape(tex), is_display == "True"] for is_display, tex in found]
    script = f"""const katex = require({json.dumps(str(KATEX / "katex.js"))});
    const formulas = JSON.parse(require("fs").readFileSync(0, "utf8"));
    console.log(JSON.stringify(formulas.map(([tex, displayMode]) =>
      katex.renderToString(tex, {{displayMode, strict: "error"}}))));"""
    command = ["node", "--eval", script]
    run = subprocess.run(command, input=json.dumps(formulas), capture_output=True, text=True)
    if run.returncode:
        raise UserError(f"KaTeX: {run.stderr.strip()[-300:]}")
    done = iter(json.loads(run.stdout))
    place = r'<math class="\w+">.*?</math>([,.;:)]*)'  # no line begins with a comma
    tie = '<span class="tie">{}{}</span>'
    return re.sub(place, lambda at: tie.format(next(done), at[1]), body, flags=re.S)


def color(code, language, _attributes=""):
    """A block of code as HTML, with a class for each kind of token."""
    import pygments
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    lexer = get_lexer_by_name(language or "text", stripnl=False)
    colored = pygments.highlight(code, lexer, HtmlFormatter(nowrap=True))
    if language == "sh":
        colored = tie_flags(colored)  # its lines wrap
    return f'<pre class="{html.escape(language) or "output"}"><code>{colored}</code></pre>\n'


def tie_flags(code):
    """HTML of code that is never broken between the hyphens of a flag and its name."""
    return re.sub(r"--\w+", r'<span class="tie">\g<0></span>', code)


class Site:
    """Writes pages, and what they link to, until no link leads to a page that is missing."""

    def __init__(self, out, model):
        self.out = out
        self.model = model  # the folder of the live page
        self.lessons = list_lessons()
        self.titles = {path: title_of(path) for path in self.lessons}
        self.markdown = make_renderer()
        self.frame = (WIDGETS / "page.html").read_text(encoding="utf-8")
        self.todo = list(self.lessons)

    def url(self, path):
        """Where a file of the repository is in the site."""
        if path in self.titles:
            return "index.html" if path.name == "README.md" else f"{path.stem}.html"
        if path.is_relative_to(LESSONS / "pictures"):
            return str(path.relative_to(LESSONS))
        suffix = "" if path.suffix in COPIED else ".html"
        return f"repository/{path.relative_to(ROOT)}{suffix}"

    def link(self, target, source):
        """A link of the file `source`, as the page of that file has it."""
        if re.match(r"[a-z]+:|#|data/", target):
            return target
        name, mark, fragment = target.partition("#")
        path = (source.parent / html.unescape(name)).resolve()
        if path not in self.todo:
            self.todo.append(path)
        return os.path.relpath(self.url(path), Path(self.url(source)).parent) + mark + fragment

    def body(self, path):
        """The content of the page of a file, or of a folder: a list."""
        if path.is_dir():
            names = sorted(p.name for p in path.iterdir() if p.suffix == ".py")
            text = f"# {path.name}\n\n" + "".join(f"- [{n}]({path.name}/{n})\n" for n in names)
            return self.markdown.render(text)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            body = typeset(self.markdown.render(text))
            body = INLINE.sub(lambda code: tie_flags(code[0]), body)
            return HOOK.sub(r'<div class="widget" data-widget="\1"></div>', body)
        language = {".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml"}.get(path.suffix)
        return f"<h1>{path.relative_to(ROOT)}</h1>\n{color(text, language or '')}"

    def anchor(self, lesson, root=".", here=None, rel=""):
        """A link to a lesson."""
        marks = f' rel="{rel}"' if rel else ' aria-current="page"' if lesson == here else ""
        return f'<a href="{root}/{self.url(lesson)}"{marks}>{html.escape(self.titles[lesson])}</a>'

    def steps(self, path):
        """The links to the lessons before and after one."""
        at = self.lessons.index(path)
        before = [self.anchor(p, rel="prev") for p in self.lessons[:at][-1:]]
        after = [self.anchor(p, rel="next") for p in self.lessons[at + 1 :][:1]]
        return "".join(before + after)

    def write(self, path):
        """Write the page of a file, or copy the file."""
        target = self.out / self.url(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in COPIED:
            shutil.copyfile(path, target)
            return
        root = os.path.relpath(self.out, target.parent)
        body = self.body(path)
        pattern = r'(?<= )(href|src|srcset)="([^"]+)"'
        body = re.sub(pattern, lambda m: f'{m[1]}="{self.link(m[2], path)}"', body)
        is_lesson = path in self.titles
        heads = re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', body) if is_lesson else []
        has_notebook = is_lesson and path.name[0].isdigit()
        values = dict(
            title=html.escape(self.titles.get(path) or title_of(path)),
            root=root,
            model=os.path.relpath(self.model, target.parent),
            menu="".join(f"<li>{self.anchor(p, root, path)}</li>" for p in self.lessons),
            heads="".join(f'<li><a href="#{id}">{text}</a></li>' for id, text in heads),
            notebook=f'<a href="{path.stem}.ipynb" download>Notebook</a>' if has_notebook else "",
            steps=self.steps(path) if is_lesson else "",
            body=body.replace("<table>", '<div class="scroll"><table>').replace(
                "</table>", "</table></div>"
            ),
        )
        page = re.sub(r"{{(\w+)}}", lambda name: values[name[1]], self.frame)
        target.write_text(page, encoding="utf-8")


# ---- Notebooks
def make_notebook(site, path):
    """A notebook of a lesson: its Python and its commands in cells that run."""
    from nbformat import v4

    lines = path.read_text(encoding="utf-8").splitlines()
    cells = []

    def add_code(source):
        cells.append(v4.new_code_cell(source, metadata=dict(tags=["runnable"])))

    def follow(match):  # a link from lesson to lesson is one from notebook to notebook
        return "](" + re.sub(r"^(\d\w*)\.html", r"\1.ipynb", site.link(match[1], path)) + ")"

    def add_text(begin, end):
        text = HOOK.sub("", "\n".join(lines[begin:end])).strip()
        if text:
            cells.append(v4.new_markdown_cell(re.sub(r"\]\(([^)\s]+)\)", follow, text)))

    at = 0
    add_code(SETUP)
    for token in site.markdown.parse("\n".join(lines)):
        if token.type != "fence" or token.info not in ("python", "sh"):
            continue
        before = "\n".join(lines[at : token.map[0]])
        is_open = before.count("<details") > before.count("</details")
        source = make_cell(token, before)
        if source and not is_open:
            add_text(at, token.map[0])
            add_code(source)
            at = token.map[1]
            if source.startswith("%%"):  # run the file as a sentence below says, if no block does
                name = Path(source.split()[1]).name
                below = "\n".join(lines[at:])
                command = re.search(rf"`(python [^`\n]*{re.escape(name)}[^`\n]*)`", below)
                if command or f"python {name}" not in below:
                    add_code(f"!{command[1] if command else f'python {name}'}")
    add_text(at, len(lines))
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # the same at each build
    kernel = dict(name="python3", display_name="Python 3", language="python")
    return v4.new_notebook(cells=cells, metadata=dict(kernelspec=kernel))


def make_cell(token, before):
    """The source of a cell, or "" for an excerpt that does not run on its own."""
    code = token.content.rstrip("\n")
    if token.info == "sh":  # a line after a backslash belongs to the one before
        return re.sub(r"(?<!\\\n)^(?=[^#\n])", "!", code, flags=re.M)
    name = SAVED.search(before.strip().split("\n\n")[-1]) or NAMED.match(code)
    if name:
        return f"%%writefile {name[1]}\n{code}"
    return code if re.search(r"^(import|from) ", code, re.M) else ""


# ---- The widgets' script
def make_script():
    """All widgets as one script: as modules, a browser would not load them from a file."""
    own = sorted({*WIDGETS.glob("*.js")} - {WIDGETS / "common.js", WIDGETS / "worker.js"})
    worker = json.dumps(bundle("crc.js", "model.js", WIDGETS / "worker.js")).translate(TAGS)
    common = bundle("sampler.js", "search.js", "pattern.js", WIDGETS / "common.js")
    each = "".join(f"{{\n{bundle(path)}}}\n" for path in own)  # with names of its own
    return f'"use strict";\nconst WORKER = {worker};\n{common}{each}start();\n'


def write_gpt(out, folder):
    """Write the network of an autoregressive run for the widget in which it races."""
    model, tokenizer, config = mdlm.load(folder, kernel="torch")
    if config.objective != "ar" or tokenizer.kind != "char":
        raise UserError(f"--gpt={folder} is not a run of characters with --objective=ar")
    contents, about = live_page.pack(model, "int8")
    about |= dict(vocab=tokenizer.vocab, files=live_page.checksums(contents))
    about["parameters"] = sum(p.numel() for p in model.parameters()) / 1e6
    (out / "gpt").mkdir(exist_ok=True)
    for name, content in contents.items():
        (out / "gpt" / name).write_bytes(content)
    (out / "gpt" / "about.json").write_text(json.dumps(about), encoding="utf-8")


def write_site(out, page):
    """Write all pages, notebooks and scripts; page: the folder of the live page."""
    install_katex()
    site = Site(out, page)
    for path in site.lessons:
        if path.name[0].isdigit():
            text = json.dumps(make_notebook(site, path), indent=1, ensure_ascii=False)
            (out / f"{path.stem}.ipynb").write_text(text + "\n", encoding="utf-8")
    for path in site.todo:  # which grows
        site.write(path)
    colors = read_asset("viewer.css").partition("* {")[0]
    styles = colors + bundle(WIDGETS / "site.css", WIDGETS / "widgets.css")
    (out / "site.css").write_text(styles, encoding="utf-8")
    shutil.copytree(
        KATEX / "fonts",
        out / "fonts",
        ignore=shutil.ignore_patterns("*.ttf", "*.woff"),
        dirs_exist_ok=True,
    )
    shutil.copy(KATEX / "katex.min.css", out)
    (out / "widgets.js").write_text(make_script(), encoding="utf-8")
    return site


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="site", help="folder to write; its old pages are replaced")
    about = "folder of a page that export.py --to=page wrote; without it, OUT/page is made"
    parser.add_argument("--page", help=about)
    about = "autoregressive run that races against the model in lesson 7"
    parser.add_argument("--gpt", default=LESSONS / "gpt", help=about)
    args = parser.parse_args(argv)
    missing = [pip for name, pip in PACKAGES.items() if not environment.is_installed(name)]
    if missing:
        needed = f"the site needs {', '.join(missing)}"
        raise UserError(f"{needed}; type: {environment.pip_install(*missing)}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    page = Path(args.page or out / "page")
    if not (page / "weights.bin").is_file():
        weights = ROOT / "weights" / "shakespeare"
        code = export.main(["--to=page", f"--out_dir={weights}", f"--dest={page}"])
        if code:
            return code
    write_gpt(out, args.gpt)
    site = write_site(out, page)
    print(f"{out}: {len(site.todo)} pages and files; python -m http.server -d {out} shows them")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
