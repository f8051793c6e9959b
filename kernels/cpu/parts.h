// The parts of a level, which build.py compiles as units of their own, at the same time: LEVEL_PART 0 has the C interface,
// and each other part has linear layers of some formats of weights. Included inside a level's namespace; see level_*.cpp.
//
// EACH_FORMAT(X) is X(Format) for the formats of this part; in part 0 for all formats, whose functions it only declares.

#define GROUPED_FORMATS(X)                                                                        \
    X(WordFormat)                                                                                 \
    X(GroupedFormat<Groups<Uint4Codes>>) X(GroupedFormat<Groups<Mxfp4Codes>>)                     \
    X(GroupedFormat<Groups<Fp8Codes>>) X(GroupedFormat<Groups<Uint8Codes>>)                       \
    X(GroupedFormat<KQuants<4>>) X(GroupedFormat<KQuants<6>>)                                     \
    X(GroupedFormat<Groups<TableCodes<Nf4>>>) X(GroupedFormat<Groups<TableCodes<Fp4>>>)           \
    X(GroupedFormat<Groups<Sint8Codes>>) X(GroupedFormat<Nvfp4Groups>)

#ifdef ACT_BF16
#define FLOAT_FORMATS(X)
#define INTEGER_FORMATS(X)
#else
#define FLOAT_FORMATS(X) X(HalfFormat<Bfloat16Unit>) X(HalfFormat<Float16Unit>)
#define INTEGER_FORMATS(X) X(ByteFormat) X(NibbleFormat)
#endif

#define INSTANCE template
#if LEVEL_PART == 0
#undef INSTANCE
#define INSTANCE extern template
#define EACH_FORMAT(X) GROUPED_FORMATS(X) FLOAT_FORMATS(X) INTEGER_FORMATS(X)
#elif LEVEL_PART == 1
#define EACH_FORMAT(X) GROUPED_FORMATS(X)
#elif LEVEL_PART == 2
#define EACH_FORMAT(X) FLOAT_FORMATS(X)
#elif LEVEL_PART == 3
#define EACH_FORMAT(X) INTEGER_FORMATS(X)
#else
#error "LEVEL_PART is not set: build.py compiles each level_*.cpp once for each part"
#endif
