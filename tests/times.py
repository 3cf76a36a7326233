"""What each slow test takes, of a report by pytest: seconds, cases, and the name, longest first.

python -m pytest -m slow --junitxml=slow.xml
python tests/times.py slow.xml
"""

import sys
from collections import Counter
from xml.etree import ElementTree


def main(report):
    seconds = Counter()
    cases = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            name = f"{case.get('classname')}::{case.get('name').split('[')[0]}"
            seconds[name] += float(case.get("time"))
            cases[name] += 1
    for name, total in seconds.most_common():
        print(f"{total:6.0f} s  {cases[name]:4}  {name}")
    print(f"{seconds.total():6.0f} s  {cases.total():4}  all")


if __name__ == "__main__":
    main(*sys.argv[1:])
