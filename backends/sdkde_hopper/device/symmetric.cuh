// How points lie for ``mean_symmetric``, in WIDTH dimensions: 8 or 16.
//
// For the exponents a point is hi (WIDTH) | constants (8, or 16) | lo (WIDTH), as a row in this order, and in a tile of
// 64 columns K slowest, eight of K after another. As what φ is multiplied by it is hi (WIDTH) | one, free (8) | lo
// (WIDTH), transposed: eight points after another. In bytes likewise, sixteen points after another.

static_assert(WIDTH == 8 || WIDTH == 16, "dimensions");
constexpr int GROUPS = WIDTH / 8;
constexpr int EXPONENTS = 3 * WIDTH, EXPONENT_BYTES = TILE_COLUMNS * EXPONENTS * 2;
constexpr int VALUES = 2 * WIDTH + 8, VALUE_BYTES = TILE_COLUMNS * VALUES * 2;
constexpr int TILE_BYTES = EXPONENT_BYTES + VALUE_BYTES;
constexpr int BYTE_TILE = TILE_COLUMNS * VALUES;
constexpr int SUMS = WIDTH + 4;  // of a row: Σφv, Σφ, and three that are free
