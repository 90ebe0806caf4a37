/* elementwise.c in vectors of 32 bytes: see lengths.h. */

#define SHORT_VECTORS

#include "lengths.h"

#if HAS_BOTH_LENGTHS
#include "elementwise.c"
#endif
