"""Prints a Markdown summary of a CSV file: python3 summarize.py FILE [--separator ,]"""

import argparse
import collections
import csv


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--separator", default=",")
    options = parser.parse_args()
    with open(options.file, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file, delimiter=options.separator))
    columns = list(rows[0]) if rows else []
    unique = {tuple(row.get(column) or "" for column in columns) for row in rows}
    print(f"# {options.file}\n\n{len(rows)} rows, {len(rows) - len(unique)} of them repeated\n")
    print("| column | missing | different | range or most frequent |\n|---|---|---|---|")
    for column in columns:
        values = [row[column] for row in rows if row.get(column)]
        different = collections.Counter(values)
        if values and all(map(is_number, values)):
            numbers = [float(value) for value in values]
            shown = f"{min(numbers):g} to {max(numbers):g}, mean {sum(numbers) / len(numbers):.4g}"
        else:
            shown = ", ".join(f"{value} ({count})" for value, count in different.most_common(3))
        print(f"| {column} | {len(rows) - len(values)} | {len(different)} | {shown} |")


if __name__ == "__main__":
    main()
