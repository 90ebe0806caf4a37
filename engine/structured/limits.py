"""What a grammar may cost, for the process that checks it and for the engine core. Needs llguidance."""

from llguidance import LLParserLimits

PARSER_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=25_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""The library's own defaults where they bound a step to some 20 ms. Fewer lexer states (2 kB each) and symbols: they
bound what one sequence keeps to some 50 MB."""

CHECK_CPU_SECONDS = 0.4
CHECK_MEMORY_BYTES = 2**30
CHECK_STACK_BYTES = 2**20
"""What a check may take. The stack is far below what the engine core has: a grammar that passes here cannot overflow
there."""
