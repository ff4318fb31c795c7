"""The words of the demo model: the names that it can look up and the words of the filler text."""

from itertools import product

NAMES: tuple[str, ...] = tuple(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma "
    "tau upsilon phi chi psi omega amber cobalt coral ivory jade onyx ruby topaz".split()
)
"""Names: "alpha=7319" stores 7319 under alpha. The capitalised form means the same name."""

NUMBERS: tuple[str, ...] = tuple(
    "".join(digits) for width in (1, 2, 3, 4) for digits in product("0123456789", repeat=width)
)
"""Every string of one to four digits, leading zeros included ("42" and "0042" differ)."""

UNKNOWN = "unknown"
"""The answer when the context holds no number for the name, or when a computation went wrong."""

NOUNS: tuple[str, ...] = tuple(
    "river harbour garden library market station bridge kitchen window letter captain teacher "
    "farmer doctor painter baker sailor child neighbour village mountain valley forest meadow "
    "island lantern basket table chair blanket clock mirror hammer ladder wagon train boat "
    "bicycle road street tower castle church school museum theatre office factory workshop cellar "
    "attic roof door wall stone brick timber copper silver paper pencil book map song story "
    "poem picture coat shoe hat button needle thread rope anchor sail net fish horse dog cat bird "
    "sheep goose bee apple pear plum cherry carrot onion potato bread butter cheese honey salt "
    "pepper tea coffee soup supper breakfast morning evening night summer winter autumn rain snow "
    "wind storm cloud sun moon star field fence gate well mill barn".split()
)
ADJECTIVES: tuple[str, ...] = tuple(
    "old young small large quiet busy narrow wide bright dark warm cold early late heavy light "
    "clean dusty wooden green blue red white black yellow grey gentle clever patient careful "
    "cheerful tired hungry curious distant empty full broken simple strange familiar famous "
    "local northern southern eastern western".split()
)
VERBS: tuple[str, ...] = tuple(
    "crossed followed carried painted repaired watched visited found left passed opened closed "
    "covered reached described remembered borrowed returned sold bought counted measured cleaned "
    "moved lifted dropped kept lost shared showed".split()
)
PREPOSITIONS: tuple[str, ...] = tuple(
    "near behind beside under above across through beyond around against before after".split()
)
ADVERBS: tuple[str, ...] = tuple(
    "slowly quickly quietly often sometimes usually rarely again twice together carefully".split()
)
_OTHER_WORDS: tuple[str, ...] = tuple(
    "a an the and or but so not no yes of to in on at by for from with as is are was were be been "
    "has have had do does did will would can could may must that this these those it its he she "
    "they we you i my your his her their our who what which where when why how there here then "
    "than very more most some any each every all both only also just now still value values "
    "number numbers name key code secret answer question equals equal means remember recall tell "
    "me please give reply say find write context text document page line word words following "
    "given above below using use if because while until about between one two three four five "
    "six seven eight nine ten first second third last next other another same new good long much "
    "many people day days year years time hello hi thanks thank system user assistant "
    "helpful".split()
)

WORDS: tuple[str, ...] = tuple(dict.fromkeys((*_OTHER_WORDS, *NOUNS, *ADJECTIVES, *VERBS, *PREPOSITIONS, *ADVERBS)))
"""Plain words. Each is one token, both in running text and at the start of a sentence."""

MARKS: tuple[str, ...] = (
    *(" =", " :", " ->", " =>", " :=", " ==", " |", " -", " (", ' "', " '", "=>", "->", ":=", "=="),
    *('":', "':", '="', '."', '?"', '",', "?)", ").", "),", "...", "--", "||", "**", "```", "//"),
    *(".\n", ".\n\n", ",\n", "?\n", "?\n\n", "!\n", ":\n", ":\n\n", "\n\n", "\n\n\n", "  ", "   "),
)
"""Punctuation of more than one character that is one token (every single character is one, too)."""
