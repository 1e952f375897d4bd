"""Names that a site such as LeetCode gives to each program without an import, as Python code that defines them."""

from __future__ import annotations

from collections.abc import Set

_MODULES = (
    "bisect cmath collections copy datetime decimal functools fractions heapq itertools json math operator random re "
    "statistics string sys time typing"
).split()
# A module, then names that are imported from it.
_IMPORTS = """
typing Any Callable Deque DefaultDict Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping NamedTuple
typing Optional Sequence Set Tuple Type TypeVar Union
collections ChainMap Counter OrderedDict defaultdict deque namedtuple
heapq heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest
bisect bisect_left bisect_right insort insort_left insort_right
functools cache cmp_to_key lru_cache partial reduce total_ordering
itertools accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby islice
itertools pairwise permutations product repeat starmap takewhile tee zip_longest
math ceil comb cos dist e exp factorial fabs floor gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod sin sqrt tan
math trunc
string ascii_letters ascii_lowercase ascii_uppercase digits punctuation
operator add and_ attrgetter itemgetter mul or_ sub xor
random choice randint shuffle
decimal Decimal
fractions Fraction
dataclasses dataclass field
abc ABC abstractmethod
enum Enum
copy deepcopy
sys maxsize
"""
_CLASSES = {
    "ListNode": "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n",
    "TreeNode": "class TreeNode:\n    def __init__(self, val=0, left=None, right=None):\n"
    "        self.val, self.left, self.right = val, left, right\n",
}


def definitions(names: Set[str]) -> str:
    """Return code that defines those of `names` that a site provides; "" for none."""
    lines = [f"import {module}\n" for module in _MODULES if module in names]
    for module, *provided in map(str.split, _IMPORTS.strip().splitlines()):
        if mine := [name for name in provided if name in names]:
            lines.append(f"from {module} import {', '.join(mine)}\n")
    return "".join([*lines, *(code for name, code in _CLASSES.items() if name in names)])
