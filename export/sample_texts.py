"""Two sets of texts that ship with the exporter: one to calibrate on, another to measure on.

Both were written for this project, so no licence comes with them, and neither holds a line of any
benchmark. A tuple is a dialogue of alternating user and assistant turns; a string is plain text.
"""

from __future__ import annotations

Text = str | tuple[str, ...]

CALIBRATION: tuple[Text, ...] = (
    (
        "Why do we have seasons?",
        "The Earth's axis is tilted by about 23.4 degrees against the plane of its orbit. In June "
        "the northern half leans towards the Sun: days are long and sunlight falls steeply, so the "
        "ground warms up. In December it leans away. The distance to the Sun hardly matters; in "
        "fact the Earth is closest to it in early January.",
        "So the southern half has summer then?",
        "Yes. When it is winter in Oslo it is summer in Cape Town. Near the equator the length of "
        "the day barely changes, and people there speak of wet and dry seasons instead.",
    ),
    (
        "A baker packs 18 rolls into each of 7 boxes and has 5 rolls left over. She sells 4 boxes. "
        "How many rolls does she still have?",
        "She starts with 7 x 18 + 5 = 126 + 5 = 131 rolls. The 4 boxes she sells hold 4 x 18 = 72 "
        "rolls. She still has 131 - 72 = 59 rolls.",
    ),
    (
        "Write a Python function that returns the longest run of equal items in a list.",
        "```python\n"
        "def longest_run(items):\n"
        '    """Return (value, length) of the longest run, or (None, 0) for an empty list."""\n'
        "    best_value, best_length = None, 0\n"
        "    start = 0\n"
        "    for i in range(1, len(items) + 1):\n"
        "        if i == len(items) or items[i] != items[start]:\n"
        "            if i - start > best_length:\n"
        "                best_value, best_length = items[start], i - start\n"
        "            start = i\n"
        "    return best_value, best_length\n"
        "```\n"
        "It walks the list once and needs constant memory.",
    ),
    (
        "Summarise in one sentence: The town council met on Tuesday to discuss the old bridge. "
        "Engineers had found cracks in two of its piers. Repairing them would cost 1.2 million and "
        "take eight months; a new bridge would cost 4 million and take two years. After a long "
        "debate the council voted seven to four for the repair.",
        "The council decided, seven votes to four, to repair the cracked bridge for 1.2 million "
        "rather than replace it for 4 million.",
    ),
    (
        "Gib mir drei Tipps gegen Müdigkeit am Nachmittag, please answer in English.",
        "1. Take a ten-minute walk outside; daylight helps more than a second coffee.\n"
        "2. Eat a lighter lunch with some protein, and drink water.\n"
        "3. Put the task you like best at three o'clock, when attention is lowest.",
    ),
    "The harbour lay still under a thin fog. Two men were mending nets on the quay and did not "
    "look up when the ferry came in, late as always on Thursdays. Anna counted the passengers: a "
    "priest with a bicycle, a woman carrying a cello, four schoolchildren, nobody else. She "
    "closed the notebook. If her brother was not on this boat he would not be on the next one "
    "either, because the next one carried only sheep.\n\nShe walked back along the mole. The "
    "light at its end had been automatic for eleven years, but the keeper's chair still stood "
    "beside the door, and somebody had painted it blue again this spring.",
    "Let f(x) = x^3 - 3x + 1. Then f'(x) = 3x^2 - 3 = 3(x - 1)(x + 1), which is zero at x = -1 "
    "and x = 1. Since f''(x) = 6x, the point (-1, 3) is a local maximum and (1, -1) a local "
    "minimum. The values change sign between -2 and -1, between 0 and 1, and between 1 and 2, so "
    "f has three real roots. None of them is rational: a rational root would divide 1, but f(1) = "
    "-1 and f(-1) = 3. With x = 2 cos(t) the equation becomes 2 cos(3t) + 1 = 0, hence t = 40, 80 "
    "or 160 degrees.",
    "import csv\nfrom collections import Counter\nfrom pathlib import Path\n\n\n"
    "class Ledger:\n"
    '    """Amounts per account, read from a CSV file with columns date, account, amount."""\n\n'
    "    def __init__(self, path: Path) -> None:\n"
    "        self._totals: Counter[str] = Counter()\n"
    "        with path.open(newline='') as lines:\n"
    "            for row in csv.DictReader(lines):\n"
    "                self._totals[row['account']] += round(float(row['amount']) * 100)\n\n"
    "    def balance(self, account: str) -> float:\n"
    "        if account not in self._totals:\n"
    "            raise KeyError(f'no account {account!r}; known are {sorted(self._totals)}')\n"
    "        return self._totals[account] / 100\n",
    "## Installing\n\nDownload the archive for your system, unpack it, and run `./setup --prefix "
    "$HOME/tools`. The setup needs about 200 MB of free space.\n\n| option | default | meaning |\n"
    "|---|---|---|\n| `--prefix DIR` | /usr/local | where the files go |\n| `--jobs N` | 4 | how "
    'many compilers run at once |\n\n{"version": 3, "enabled": true, "paths": ["bin", "lib"], '
    '"limits": {"memory_mb": 512, "timeout_s": 30}}\n',
    "Enzymes lower the activation energy of a reaction without being used up. A substrate binds to "
    "the active site, the complex passes through a transition state, and the product is released. "
    "At low substrate concentration the rate grows linearly; at high concentration every active "
    "site is occupied and the rate levels off at its maximum. The concentration at half of that "
    "maximum is called the Michaelis constant. A competitive inhibitor raises the constant and "
    "leaves the maximum; a non-competitive one does the opposite.",
)

HELD_OUT: tuple[Text, ...] = (
    (
        "How does a refrigerator keep food cold?",
        "It moves heat from the inside to the room behind it. A pump compresses a gas, which "
        "becomes hot; in the coils at the back it gives off that heat and turns into a liquid. The "
        "liquid then passes through a narrow valve, expands and evaporates inside the cabinet, and "
        "evaporating takes heat from the air around it. The gas returns to the pump and the cycle "
        "starts again.",
        "Does it help to leave the door open on a hot day?",
        "No. The heat taken from the inside is released into the same room, together with the heat "
        "of the pump's motor, so the kitchen becomes warmer.",
    ),
    (
        "A train leaves at 9:40 and travels 210 km at 84 km per hour. When does it arrive?",
        "The journey takes 210 / 84 = 2.5 hours, which is 2 hours and 30 minutes. 9:40 plus 2 "
        "hours 30 minutes is 12:10. The train arrives at 12:10.",
    ),
    (
        "Write a Python function that merges two sorted lists.",
        "```python\n"
        "def merge(left, right):\n"
        "    merged = []\n"
        "    i = j = 0\n"
        "    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n"
        "            merged.append(left[i])\n"
        "            i += 1\n"
        "        else:\n"
        "            merged.append(right[j])\n"
        "            j += 1\n"
        "    return merged + left[i:] + right[j:]\n"
        "```\n"
        "The loop looks at each item once, so the time grows with the sum of both lengths.",
    ),
    (
        "Rewrite politely: Send me the report now, you are late.",
        "Could you please send me the report when you have a moment? It was due yesterday, and I "
        "would like to read it before our meeting this afternoon.",
    ),
    "Glaciers are rivers of ice. Snow that survives the summer is buried by the snow of the next "
    "winter, and after some decades its crystals have been pressed into solid ice. When the layer "
    "is thick enough, about forty metres, its own weight makes it flow downhill, by a few "
    "centimetres a day in the mountains and by several metres a day where it reaches the sea. The "
    "ice carries stones that scratch the bedrock; from those scratches one can still read the "
    "direction in which a glacier moved ten thousand years ago.",
    "The old clockmaker had never asked anybody for help, and he did not intend to begin on "
    "the day before his eightieth birthday. Still, the tower clock had struck thirteen at "
    "noon, the mayor had sent a boy with a note, and there were ninety-two steps between the "
    "street and the mechanism. He put a screwdriver and a sandwich into his coat. On the "
    'fortieth step he sat down. "You are the one who repairs the time?" said a girl who was '
    'sitting there already, with a cat on her knees. "I only repair the clock," he said.',
    "Suppose that n is odd. Then n = 2k + 1 for some integer k, and n^2 = 4k^2 + 4k + 1 = "
    "4k(k + 1) + 1. One of two neighbouring integers k and k + 1 is even, so k(k + 1) is divisible "
    "by 2 and 4k(k + 1) by 8. Hence the square of every odd number leaves the remainder 1 when it "
    "is divided by 8. It follows that the sum of three odd squares leaves the remainder 3 and is "
    "never a square itself.",
    "def parse_duration(text: str) -> int:\n"
    '    """Return the seconds in a duration such as 1h30m or 45s."""\n'
    "    factors = {'h': 3600, 'm': 60, 's': 1}\n"
    "    total, digits = 0, ''\n"
    "    for character in text.strip().lower():\n"
    "        if character.isdigit():\n"
    "            digits += character\n"
    "        elif character in factors and digits:\n"
    "            total += int(digits) * factors[character]\n"
    "            digits = ''\n"
    "        else:\n"
    "            raise ValueError(f'not a duration: {text!r}')\n"
    "    return total\n",
)
